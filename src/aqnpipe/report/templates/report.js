"use strict";
(() => {
const say = document.body.dataset, all = (selector, root = document) => [...root.querySelectorAll(selector)];
const make = (tag, set = {}, ...inside) => { const node = Object.assign(document.createElement(tag), set); node.append(...inside); return node };

// A link into a folded part opens it.
const reveal = () => {
  let target = null;
  try { target = document.getElementById(decodeURIComponent(location.hash.slice(1))) } catch { return }
  if (!target) return;
  const own = target.matches("details") ? target : target.querySelector(":scope > details");
  if (own) own.open = true;
  for (let node = target.parentElement; node; node = node.parentElement) if (node.matches("details")) node.open = true;
  target.scrollIntoView();
};
addEventListener("hashchange", reveal);
reveal();
all(".link").forEach(link => link.addEventListener("click", () => {
  if (navigator.clipboard) navigator.clipboard.writeText(link.href).then(() => tell(say.copied), () => {});
}));

// Values at the marks: on hover, and with the arrow keys where a picture has the focus.
const tip = make("div", { id: "tip" }), spoken = make("div", { className: "skip" });
tip.setAttribute("aria-hidden", "true");
spoken.setAttribute("role", "status");
document.body.append(tip, spoken);
const tell = text => { spoken.textContent = text };
const textOf = mark => {
  const title = mark.querySelector(":scope > title");
  if (title) { mark.dataset.t = title.textContent; title.remove() }
  return mark.dataset.t;
};
let lit = null;
const hide = () => { tip.textContent = ""; lit?.classList.remove("here"); lit = null };
const show = (mark, x, y, ring) => {
  hide();
  const text = textOf(mark);
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 16 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 16}px`;
  if (ring) { mark.classList.add("here"); lit = mark; tell(text) }
};
document.addEventListener("pointerover", event => {
  const mark = event.target instanceof SVGElement && event.target.closest("svg") && event.target;
  if (mark && (mark.dataset.t || mark.querySelector(":scope > title"))) show(mark, event.clientX, event.clientY, false);
  else hide();
});
document.addEventListener("keydown", event => { if (event.key === "Escape") hide() });
all(".panels svg").forEach(svg => {
  if (!svg.querySelector("title")) return;
  svg.setAttribute("tabindex", "0");
  svg.setAttribute("aria-description", say.marks);
  let at = -1;
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const marks = all("[data-t], :has(> title)", svg).filter(mark => mark.getClientRects().length && textOf(mark).includes(" "));
    if (!marks.length) return;
    const centre = mark => { const box = mark.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2] };
    marks.sort((a, b) => (a.dataset.s ?? "").localeCompare(b.dataset.s ?? "") || centre(a)[0] - centre(b)[0]);
    at = (at + step + marks.length) % marks.length;
    show(marks[at], ...centre(marks[at]), true);
  });
});

// A picture enlarged: it moves into a dialog, where it is scaled and scrolled, and back when that is closed.
const sheet = make("dialog", { id: "zoom" }), room = make("div", { className: "room", tabIndex: 0 });
const scales = [1, 1.5, 2, 3, 4];
let home = null, scale = 0;
const rescale = step => {
  scale = Math.max(0, Math.min(scales.length - 1, scale + step));
  room.firstElementChild.style.width = `${100 * scales[scale]}%`;
  smaller.disabled = scale === 0;
  larger.disabled = scale === scales.length - 1;
};
const act = (text, title, action) => { const button = make("button", { type: "button", title }, text); button.setAttribute("aria-label", title); button.addEventListener("click", action); return button };
const larger = act("+", say.larger, () => rescale(1)), smaller = act("−", say.smaller, () => rescale(-1));
const heading = make("h2", { id: "zoom-title" });
sheet.setAttribute("aria-labelledby", "zoom-title");
room.setAttribute("role", "region");
room.setAttribute("aria-labelledby", "zoom-title");
sheet.append(make("div", { className: "bar" }, heading, smaller, larger, act("✕", say.close, () => sheet.close())), room);
document.body.append(sheet);
sheet.addEventListener("keydown", event => { if (event.key === "+" || event.key === "=") rescale(1); else if (event.key === "-") rescale(-1) });
sheet.addEventListener("close", () => {
  hide();
  const picture = room.firstElementChild;
  picture.style.width = "";
  home.append(picture);
  document.body.append(tip, spoken);
});
// A picture as a file of its own: in the colours of the page, without the arms that are switched off, its legend below.
const save = panel => {
  const copy = panel.querySelector("svg").cloneNode(true), name = panel.querySelector("h3").firstChild.textContent.trim();
  const [width, height] = copy.getAttribute("viewBox").split(" ").slice(2).map(Number), legend = panel.parentElement.previousElementSibling;
  const keys = legend?.matches(".legend") ? all("li", legend).filter(key => !key.querySelector(".dim")) : [];
  const xml = node => new XMLSerializer().serializeToString(node), colours = getComputedStyle(document.documentElement);
  all(".off", copy).forEach(mark => mark.remove());
  for (const [side, size] of [["width", width], ["height", height]]) copy.setAttribute(side, size);
  const wide = Math.max(width, ...keys.map(key => 50 + 6.2 * key.textContent.length));
  const lines = keys.map((key, row) => `<g transform="translate(8 ${height + 16 * row + 3})">${xml(key.querySelector("path"))}<text x="42" y="9" font-size="11" fill="var(--ink)">${xml(new Text(key.textContent))}</text></g>`);
  const text = `<svg xmlns="http://www.w3.org/2000/svg" width="${wide}" height="${height + 16 * keys.length + 8}" font-family='${getComputedStyle(document.body).fontFamily}'><rect width="100%" height="100%" fill="var(--card)"/>${xml(copy)}${lines.join("")}</svg>`;
  const shown = text.replace(/var\((--[\w-]+)\)/g, (_, colour) => colours.getPropertyValue(colour).trim());
  const link = make("a", { href: URL.createObjectURL(new Blob([shown], { type: "image/svg+xml" })), download: `${name.replace(/[^\p{L}\p{N}]+/gu, "-")}.svg` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
};
all(".panels > div").forEach(panel => {
  const title = panel.querySelector("h3");
  if (!title) return;
  title.append(" ", act("⤢", `${say.enlarge}: ${title.textContent}`, () => {
    home = panel;
    heading.textContent = title.firstChild.textContent;
    room.append(panel.querySelector("svg"));
    sheet.append(tip, spoken);
    scale = 0;
    rescale(0);
    sheet.showModal();
  }), " ", act("⤓", `${say.save}: ${title.textContent}`, () => save(panel)));
});

// Arms switched on and off in all pictures together.
const switches = new Map(), hidden = new Set();
const paint = name => {
  all(`.panels [data-s="${CSS.escape(name)}"]`).forEach(mark => mark.classList.toggle("off", hidden.has(name)));
  switches.get(name).forEach(button => {
    button.setAttribute("aria-pressed", String(!hidden.has(name)));
    button.classList.toggle("dim", hidden.has(name));
  });
};
all(".legend [data-s], .arms [data-s]").forEach(holder => {
  const name = holder.dataset.s, button = make("button", { type: "button", title: `${say.toggle}: ${name}` }, ...holder.childNodes);
  holder.append(button);
  switches.set(name, [...(switches.get(name) ?? []), button]);
  button.setAttribute("aria-pressed", "true");
  button.addEventListener("click", () => { hidden.has(name) ? hidden.delete(name) : hidden.add(name); paint(name) });
  button.addEventListener("dblclick", () => {
    switches.forEach((_, other) => { other === name ? hidden.delete(other) : hidden.add(other) });
    switches.forEach((_, other) => paint(other));
  });
});
const tableOfArms = document.querySelector(".scroll.arms");
if (tableOfArms) {
  const again = make("button", { type: "button" }, say.all);
  again.addEventListener("click", () => { hidden.clear(); switches.forEach((_, name) => paint(name)) });
  all(".legend").forEach((legend, number) => number || legend.before(make("div", { className: "tool" }, again)));
}

// Every table sorts by a click on its head; long ones have a filter.
const number = text => { const found = /^[<>]?\s*([+\-−]?[\d,.]+(?:e[+\-−]?\d+)?)/.exec(text.trim()); return found ? +found[1].replaceAll(",", "").replaceAll("−", "-") : NaN };
const compare = (a, b) => {
  const x = number(a), y = number(b);
  if (isNaN(x) && isNaN(y)) return a.localeCompare(b, undefined, { numeric: true });
  return isNaN(x) ? 1 : isNaN(y) ? -1 : x - y;
};
const search = (label, items, textOfItem, after) => {
  const field = make("input", { type: "search" }), count = make("span");
  const tool = make("div", { className: "tool" }, make("label", {}, `${label} `, field), count);
  const texts = items.map(item => textOfItem(item).toLowerCase());
  field.addEventListener("input", () => {
    const wanted = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    items.forEach((item, n) => { const fits = wanted.every(word => texts[n].includes(word)); item.hidden = !fits; left += fits });
    count.textContent = wanted.length ? `${left} / ${items.length}` : "";
    after?.(wanted.length > 0);
  });
  return tool;
};
const equip = table => {
  const body = table.tBodies[0], rows = [...body.rows];
  if (rows.length < 2) return;
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = make("button", { type: "button", title: `${say.sort} ${head.textContent}` }, ...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      all("[aria-sort]", table).forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const order = [...body.rows].sort((a, b) => compare(a.cells[column].textContent, b.cells[column].textContent));
      body.append(...(down ? order.reverse() : order));
    });
  });
  if (rows.length > 8) table.parentElement.before(search(say.filter, rows, row => row.textContent));
};
// Tables in folded parts get their buttons when they are opened: a large page opens in time.
const equipSeen = inside => all("table:not([data-ready])", inside).forEach(table => {
  if (table.closest("details:not([open])")) return;
  table.dataset.ready = "1";
  equip(table);
});
equipSeen(document);
document.addEventListener("toggle", event => equipSeen(event.target), true);
const claims = all("#claims li");
if (claims.length > 8) {
  document.getElementById("claims").prepend(search(say.claims, claims, claim => claim.querySelector("summary").textContent + claim.querySelector(".sentence").textContent,
    active => all("#claims details.open").forEach(fold => { if (active) fold.open = true })));
}
// Any two arms, side by side: the questions that one of them answers correctly in more of its seeds.
const outcomes = document.querySelector('[data-table="outcomes"]');
if (outcomes) {
  const names = [...outcomes.tHead.rows[0].cells].map(head => head.textContent), count = make("span");
  const share = cell => { const [right, seeds] = cell.textContent.split("/"); return right / seeds };
  const choose = () => {
    const [a, b] = sides.map(side => +side.value), better = [0, 0];
    all("tr", outcomes).forEach(row => {
      [...row.cells].forEach((cell, n) => { cell.hidden = a && b && n > 1 && n !== a && n !== b });
      if (row.parentElement !== outcomes.tBodies[0]) return;
      const first = a && share(row.cells[a]), second = b && share(row.cells[b]);
      row.classList.toggle("alike", a && b && first === second);
      if (first !== second) better[first > second ? 0 : 1] += 1;
    });
    count.textContent = a && b ? `${names[a]} > ${names[b]}: ${better[0]}, ${names[b]} > ${names[a]}: ${better[1]}` : "";
  };
  const sides = [0, 1].map(() => make("select", { onchange: choose }, new Option("", ""), ...names.slice(2).map((name, n) => new Option(name, n + 2))));
  sides.forEach(side => side.setAttribute("aria-label", say.pair));
  outcomes.parentElement.before(make("div", { className: "tool" }, `${say.pair} `, ...sides, count));
}
const questions = all(".sides details");
if (questions.length) document.querySelector(".sides").before(search(say.questions, questions, question => question.textContent));
})();
