// Print the results of the site's own search: `node search.js SITE QUERY...`, one line of JSON each.
const fs = require("fs"), path = require("path"), vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const context = { _: (text) => text, _ready() {}, SPHINX_HIGHLIGHT_ENABLED: false };
context.window = context;
context.document = { getElementById: () => ({ lastChild: null }) };
const files = ["_static/searchtools.js", "_static/language_data.js"];
const sources = files.map((name) => fs.readFileSync(path.join(site, name), "utf8"));
vm.runInNewContext(`${sources.join("\n")}\nwindow.Search = Search;`, context);
vm.runInContext(fs.readFileSync(path.join(site, "searchindex.js"), "utf8"), context);
for (const query of queries) {
  const found = context.Search._performSearch(...context.Search._parseQuery(query));
  console.log(JSON.stringify(found.reverse().map(([page, title]) => [page, title])));
}
