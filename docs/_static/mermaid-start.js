// Draw every diagram, and again when the theme changes.
(() => {
  const isDark = () => {
    const theme = document.body.dataset.theme;
    return theme === "dark" || (theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  };
  let shown = null;
  const draw = async () => {
    if (shown === isDark()) return;
    shown = isDark();
    mermaid.initialize({startOnLoad: false, theme: shown ? "dark" : "neutral", securityLevel: "strict",
                        fontFamily: "inherit", flowchart: {htmlLabels: true}});
    for (const box of document.querySelectorAll("pre.mermaid")) {
      box.dataset.source ??= box.textContent;
      box.textContent = box.dataset.source;
      delete box.dataset.processed;
    }
    await mermaid.run({querySelector: "pre.mermaid"});
  };
  addEventListener("DOMContentLoaded", () => {
    draw();
    new MutationObserver(draw).observe(document.body, {attributes: true, attributeFilter: ["data-theme"]});
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  });
})();
