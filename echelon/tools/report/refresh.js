// Printing, and refreshing a live page. Uses `enliven` and `dragging` of charts.js.

// ---- printing: folded parts are opened while the page prints ----

let unfolded = [];
addEventListener("beforeprint", () => {
  unfolded = [...document.querySelectorAll("details:not([open])")];
  unfolded.forEach(each => { each.open = true; });
});
addEventListener("afterprint", () => { unfolded.forEach(each => { each.open = false; }); });

// ---- refreshing: replaces only changed parts, and never parts that the user has opened, scrolled or zoomed ----

const served = new Map(); // parts by id, as served, before `enliven`
const note = root => { for (const each of partsOf(root)) served.set(each.id, each.outerHTML); };
const partsOf = root => [...root.querySelectorAll("body > header, main > section, body > footer")];

const keep = old => ({
  open: new Map([...old.querySelectorAll("details[id]")].map(each => [each.id, each.open])),
  scrolled: new Map([...old.querySelectorAll("[id]")].filter(each => each.scrollTop || each.scrollLeft)
    .map(each => [each.id, [each.scrollTop, each.scrollLeft]])),
  focused: old.contains(document.activeElement) ? pathTo(document.activeElement) : null,
});
const pathTo = element_ => {
  const figure_ = element_.closest("figure.chart, details");
  if (element_.id) return `#${CSS.escape(element_.id)}`;
  if (!figure_ || !figure_.id) return null;
  const inside = element_.dataset.tool ? `[data-tool="${element_.dataset.tool}"]` : element_.matches("summary") ? "summary" : ".canvas";
  return `#${CSS.escape(figure_.id)} ${inside}`;
};
const restore = (made, kept) => {
  for (const [id, open] of kept.open) { const each = made.querySelector(`#${CSS.escape(id)}`); if (each) each.open = open; }
  for (const [id, [top, left]] of kept.scrolled) { const each = made.querySelector(`#${CSS.escape(id)}`); if (each) each.scrollTo(left, top); }
  if (kept.focused) { const each = made.querySelector(kept.focused); if (each) each.focus({ preventScroll: true }); }
};

const replace = (old, new_) => {
  const kept = old ? keep(old) : null, made = document.importNode(new_, true);
  served.set(new_.id, new_.outerHTML);
  if (old) old.replaceWith(made);
  return [made, kept];
};

const apply = page => {
  const anchor = partsOf(document).find(each => each.getBoundingClientRect().bottom > 0);
  const before = anchor && { id: anchor.id, top: anchor.getBoundingClientRect().top };
  const main = document.querySelector("main"), news = partsOf(page), names = new Set(news.map(each => each.id));
  partsOf(document).filter(each => !names.has(each.id)).forEach(each => { served.delete(each.id); each.remove(); });
  let previous = null;
  for (const each of news) {
    let here = document.getElementById(each.id);
    if (!here || served.get(each.id) !== each.outerHTML) {
      const [made, kept] = replace(here, each);
      if (!here) { if (previous && previous.parentNode === main) previous.after(made); else main.prepend(made); }
      enliven(made);
      if (kept) restore(made, kept);
      here = made;
    }
    previous = here;
  }
  document.title = page.title;
  const after = before && document.getElementById(before.id);
  if (after && scrollY > 0) scrollBy({ top: after.getBoundingClientRect().top - before.top, behavior: "instant" });
};

const selected = () => { const found = getSelection(); return found && !found.isCollapsed; };
const beat = (words, lost) => {
  const shown = document.querySelector(".beat");
  if (!shown || shown.textContent === words) return;
  shown.textContent = words;
  shown.classList.toggle("lost", lost);
};
const refresh = async (every, tag) => {
  try {
    if (!document.hidden && !dragging && !selected()) {
      const answer = await fetch(location.pathname, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        apply(new DOMParser().parseFromString(await answer.text(), "text/html"));
      } else if (answer.status !== 304) throw new Error(`status ${answer.status}`);
      beat("live", false);
    }
  } catch {
    beat("not reached any more: 'echelon watch' has ended, or the network has", true);
  }
  setTimeout(refresh, every, every, tag);
};

note(document);
enliven(document);
const live = document.body.dataset.live;
if (live) setTimeout(refresh, 1000 * live, 1000 * live, null);
