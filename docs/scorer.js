// How the search names and counts results: a section is shown with its page's title, and each place once. The changelog comes last.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: (result) => {
    const [page, , anchor, , found, , kind] = result;
    const score = page === "changelog" ? found - 1000 : found;
    if (kind !== "index") {
      if (kind === "title" && !result[1].includes(" > ")) result[2] = "";
      return score;
    }
    const { alltitles, docnames, titles } = Search._index;
    const file = docnames.indexOf(page);
    for (const [title, places] of Object.entries(alltitles))
      for (const [number, id] of places)
        if (number === file && `#${id}` === anchor)
          result[1] = `${titles[file]} > ${title}`;
    if (!result[1].includes(" > ")) result[2] = "";
    return score;
  },
};
