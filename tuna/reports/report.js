"use strict";
// Sorting, searching, copying, and details of the trials in a curve. It reads the page and fetches, stores and evaluates nothing.
document.documentElement.classList.add("script");
document.addEventListener("DOMContentLoaded", () => {
  const PAGE = 200; // layers in the table at a time, so that one of thousands stays quick
  const table = document.querySelector("#layers");
  const make = (tag, properties) => Object.assign(document.createElement(tag), properties);
  let display = () => {};
  let bodies = [];

  // -- the table of layers: one tbody for each -----------------------------------------------------------------------
  if (table) {
    bodies = [...table.tBodies];
    const heads = [...table.tHead.rows[0].cells];
    const tools = document.querySelector("#tools");
    const shown = tools.querySelector("output");
    const pages = make("p", { className: "pages" });
    const more = make("button", { type: "button", textContent: `Show ${PAGE} more` });
    const all = make("button", { type: "button", textContent: "Show all" });
    pages.append(more, all);
    table.parentElement.after(pages);
    let order = bodies;
    let fitting = new Set(bodies);
    let limit = PAGE;
    // Where rows are cards (CSS display), some browsers forget that this is a table.
    const roles = { TABLE: "table", THEAD: "rowgroup", TBODY: "rowgroup", TFOOT: "rowgroup", TR: "row", TD: "cell" };
    const tell = (part) => part.setAttribute("role", roles[part.tagName] || (part.scope === "col" ? "columnheader" : "rowheader"));
    const narrow = matchMedia("(max-width: 760px)");
    // The rows that do not show are not in the page.
    display = (always) => {
      const rows = order.filter((body) => fitting.has(body) || body === always);
      const some = rows.slice(0, limit);
      if (always && !some.includes(always)) some.push(always);
      bodies.forEach((body) => body.remove());
      const fragment = document.createDocumentFragment();
      fragment.append(...some);
      table.insertBefore(fragment, table.tFoot);
      if (narrow.matches) [table, ...table.querySelectorAll(":scope > *, :scope > * > tr, :scope > * > tr > *")].forEach(tell);
      pages.hidden = rows.length <= limit;
      const layers = rows.length === bodies.length ? `${rows.length}` : `${rows.length} of ${bodies.length}`;
      shown.textContent = `${layers} ${bodies.length === 1 ? "layer" : "layers"}` + (pages.hidden ? "" : `, the first ${limit} shown`);
    };
    more.addEventListener("click", () => ((limit += PAGE), display()));
    all.addEventListener("click", () => ((limit = Infinity), display()));

    const value = (body, column, numeric) => {
      const cell = body.rows[0].cells[column];
      const text = cell ? cell.firstChild.textContent.trim() : "";
      if (!numeric) return text.toLowerCase();
      const number = parseFloat(text.replace(/[,×±]/g, ""));
      return Number.isNaN(number) || cell.colSpan > 1 ? null : number;
    };
    const sort = (column) => {
      const head = heads[column];
      const numeric = head.classList.contains("num");
      const first = numeric ? "descending" : "ascending";
      const second = numeric ? "ascending" : "descending";
      const before = head.getAttribute("aria-sort");
      const now = before === first ? second : before === second ? "none" : first;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      order = bodies;
      if (now !== "none") {
        head.setAttribute("aria-sort", now);
        const sign = now === "ascending" ? 1 : -1;
        const compare = numeric ? (a, b) => a - b : new Intl.Collator(undefined, { numeric: true }).compare;
        order = bodies
          .map((body) => [value(body, column, numeric), body])
          .sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b)))
          .map(([, body]) => body);
      }
      display();
    };
    heads.forEach((head, column) => {
      const button = make("button", { type: "button", title: "Sort; a third time restores the order" });
      button.append(...head.childNodes);
      button.addEventListener("click", () => sort(column));
      head.append(button);
    });
    table.tHead.classList.add("on");

    const [search, solver, kind, state] = ["q", "solver", "kind", "state"].map((name) => tools.elements[name]);
    let texts = null;
    const filter = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      if (words.length && !texts)
        texts = bodies.map((body) => {
          const summary = body.querySelector("summary, .flat");
          return (body.rows[0].textContent + " " + (summary ? summary.textContent : "")).toLowerCase();
        });
      fitting = new Set(
        bodies.filter(
          (body, index) =>
            (!solver.value || body.dataset.s === solver.value) &&
            (!kind || !kind.value || body.dataset.k === kind.value) &&
            (!state.value || body.dataset.f.split(" ").includes(state.value)) &&
            words.every((word) => texts[index].includes(word)),
        ),
      );
      limit = PAGE;
      display();
    };
    tools.addEventListener("input", filter);
    tools.addEventListener("submit", (event) => event.preventDefault());
    tools.addEventListener("reset", () => setTimeout(filter));
    tools.hidden = false;
    filter();
    addEventListener("beforeprint", () => ((limit = Infinity), display()));
    addEventListener("afterprint", () => ((limit = PAGE), display()));
  }

  // -- links into closed details -------------------------------------------------------------------------------------
  const reveal = () => {
    const id = location.hash.slice(1);
    if (!/^(layer|job)-\d+$/.test(id)) return;
    const row = bodies.find((body) => body.id === id || body.querySelector(`#${id}`));
    if (row && !row.isConnected) display(row);
    const target = document.getElementById(id);
    if (!target) return;
    const own = target.matches("tbody") ? target.querySelector("details") : null;
    for (let at = own || target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    target.scrollIntoView({ block: "start" });
  };
  addEventListener("hashchange", reveal);
  reveal();

  // -- copying -------------------------------------------------------------------------------------------------------
  const copied = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = make("textarea", { value: text, readOnly: true });
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  };
  const addCopyButtons = (root) => {
    for (const label of root.querySelectorAll(".label:not(.done)")) {
      const text = label.nextElementSibling;
      if (!text || text.tagName !== "PRE") continue;
      label.classList.add("done");
      const button = make("button", { type: "button", className: "copy", textContent: "Copy" });
      button.setAttribute("aria-label", `Copy: ${label.textContent.trim()}`);
      button.addEventListener("click", async () => {
        button.textContent = (await copied(text.textContent)) ? "Copied" : "Not copied";
        setTimeout(() => (button.textContent = "Copy"), 1500);
      });
      label.append(button);
    }
  };

  // -- trials in a curve ---------------------------------------------------------------------------------------------
  const tip = make("div", { className: "tip", hidden: true });
  tip.setAttribute("role", "status");
  document.body.append(tip);
  let marked = null;
  const show = (dot) => {
    if (marked) marked.classList.remove("on");
    marked = dot;
    tip.hidden = !dot;
    if (!dot) return;
    dot.classList.add("on");
    tip.textContent = dot.dataset.text;
    const box = dot.getBoundingClientRect();
    const left = Math.min(box.left + 10, document.documentElement.clientWidth - tip.offsetWidth - 8);
    const above = box.top - tip.offsetHeight - 6;
    tip.style.left = `${Math.max(8, left) + scrollX}px`;
    tip.style.top = `${(above > 0 ? above : box.bottom + 6) + scrollY}px`;
  };
  const prepareCurve = (svg) => {
    if (svg.dataset.ready) return;
    svg.dataset.ready = "1";
    const dots = [...svg.querySelectorAll("circle:not(.end)")];
    for (const dot of dots) {
      const title = dot.querySelector("title"); // the browser's own tooltip, for pages without script
      dot.dataset.text = title ? title.textContent : "";
      if (title) title.remove();
    }
    const place = (dot) => [parseFloat(dot.getAttribute("cx")), parseFloat(dot.getAttribute("cy"))];
    svg.addEventListener("pointermove", (event) => {
      const matrix = svg.getScreenCTM();
      if (!matrix) return;
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
      let best = null;
      let least = 14;
      for (const dot of dots) {
        const [x, y] = place(dot);
        const distance = Math.hypot(x - at.x, y - at.y);
        if (distance < least) [least, best] = [distance, dot];
      }
      if (best !== marked) show(best);
    });
    svg.addEventListener("pointerleave", () => show(null));
    if (!dots.length) return;
    svg.setAttribute("tabindex", "0");
    svg.setAttribute("aria-description", "Left and right arrow keys read the trials");
    svg.addEventListener("blur", () => show(null));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") show(null);
      if (!step) return;
      event.preventDefault();
      const index = dots.indexOf(marked);
      show(dots[index < 0 ? 0 : (index + step + dots.length) % dots.length]);
    });
  };

  const prepare = (root) => {
    addCopyButtons(root);
    root.querySelectorAll("svg.curve").forEach(prepareCurve);
  };
  document.addEventListener(
    "toggle",
    (event) => {
      if (event.target.open) prepare(event.target);
      else show(null);
    },
    true,
  );
  document.querySelectorAll("section, details[open]").forEach(prepare);
  document.documentElement.classList.add("ready");
});
