// Runs the script of a server's page with a stand-in for the document: node page.mjs URL
// Prints a line of JSON after each look at the server: the texts of the elements that have an id, and of the curves.
class Element {
  constructor(tag) {
    Object.assign(this, {tag, nodes: [], attributes: {}, style: {}, dataset: {}, className: "", clientWidth: 400});
  }
  get classList() {
    const names = new Set(this.className.split(" ").filter(Boolean));
    return {toggle: (name, on) => {
      if (on) names.add(name);
      else names.delete(name);
      this.className = [...names].join(" ");
    }};
  }
  get lastChild() { return this.nodes.at(-1) ?? null; }
  get textContent() { return this.nodes.map(each => each.textContent ?? each).join(""); }
  set textContent(text) { this.nodes = [String(text)]; }
  append(...nodes) { this.nodes.push(...nodes.map(each => each instanceof Element ? each : String(each))); }
  replaceChildren(...nodes) { this.nodes = []; this.append(...nodes); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  removeAttribute(name) { delete this.attributes[name]; }
  all(tag) { return this.nodes.flatMap(each => each.tag ? [...(each.tag === tag ? [each] : []), ...each.all(tag)] : []); }
}

const [url] = process.argv.slice(2), html = await (await fetch(url)).text();
const elements = Object.fromEntries([...html.matchAll(/<(\w+)[^>]* id="(\w+)"/g)].map(([, tag, id]) => [id, new Element(tag)]));
const make = tag => new Element(tag), document = {
  title: "", getElementById: id => elements[id] ?? null, createElement: make, createElementNS: (_, tag) => make(tag),
};

function print() {
  const texts = Object.entries(elements).map(([id, each]) => [id, each.textContent]);
  const rows = elements.rows.all("tr").map(row => row.nodes.map(cell => [cell.dataset.name, cell.textContent]));
  const paths = ["loss", "score", "bytes", "pace"].map(id => [id, elements[id].all("path").map(each => each.attributes.d)]);
  console.log(JSON.stringify({
    title: document.title, ...Object.fromEntries(texts), bar: elements.bar.style.width,
    rows: rows.map(Object.fromEntries), paths: Object.fromEntries(paths),
  }));
}

// The print comes after the end of `poll`: what it raises ends this program first.
const later = poll => setTimeout(() => { print(); setTimeout(poll, 100); }, 0);
const ask = (path, options) => fetch(new URL(path, url), options);
const [, script] = html.match(/<script>([^]*)<\/script>/);
new Function("document", "addEventListener", "fetch", "setTimeout", script)(document, () => {}, ask, later);
