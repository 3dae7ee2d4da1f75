// How the search names, counts and finds results: a section is shown with its page's title, and each place once. The changelog comes last.
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

// If no page but the changelog has all words of a query, show the pages that have most of them.
const searchAll = Search._performSearch;
Search._performSearch = (query, ...parsed) => {
  const found = searchAll(query, ...parsed);
  if (found.some(([page]) => page !== "changelog")) return found;
  const pages = new Map();
  for (const word of splitQuery(query)) {
    const [, terms] = Search._parseQuery(word);
    const best = new Map(); // of each page; results come in the order of their scores
    if (terms.size > 0)
      for (const result of searchAll(...Search._parseQuery(word))) best.set(result[0], result);
    for (const [page, result] of best) {
      const known = pages.get(page) ?? { words: 0, score: 0, result };
      known.words += 1;
      known.score += result[4];
      if (result[4] > known.result[4]) known.result = result;
      pages.set(page, known);
    }
  }
  Search._parseQuery(query); // whose words the pages highlight
  const all = [...pages.values()];
  const most = Math.max(...all.map(({ words }) => words));
  const shown = all.filter(({ words }) => words === most);
  return shown.sort((a, b) => a.score - b.score).map(({ result }) => result);
};
