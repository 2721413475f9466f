// Bring the page that is read into view in the list of chapters.
addEventListener("DOMContentLoaded", () => {
  const list = document.querySelector(".sidebar-scroll");
  const here = list?.querySelector(".current-page");
  if (!here) return;
  const down = here.getBoundingClientRect().top - list.getBoundingClientRect().top;
  if (down > list.clientHeight * .8)
    list.scrollTo({top: down - list.clientHeight / 2, behavior: "instant"});
});
