// Chapters first, then the other pages; a member of the library last, unless its name was asked for.
const placeOf = {nbs: 12, docs: 6};
var Scorer = {
  score: ([doc, title, anchor, descr, score, file, kind]) =>
    score + (kind === "object" || doc.startsWith("docs/generated/") ? 0 : placeOf[doc.split("/")[0]] ?? 0),
  objNameMatch: 25, objPartialMatch: 4,
  objPrio: {0: 0, 1: 0, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
