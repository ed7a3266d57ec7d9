// Draws the figures from the page's JSON when they come near the screen, in the page's colours and width, and again
// when either changes.
const specs = JSON.parse(document.getElementById("figures").textContent);
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const plotConfig = { responsive: true, displaylogo: false, displayModeBar: false };
const drawn = new Set();

const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);
// The colour that a variable has now, light or dark.
const colour = (name) => {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
};

const themed = (layout) => {
  const copy = structuredClone(layout);
  copy.font = { ...copy.font, color: colour("--ink") };
  copy.hoverlabel = { ...copy.hoverlabel, bgcolor: colour("--raised"), bordercolor: colour("--line"), font: { color: colour("--ink") } };
  for (const key of Object.keys(copy)) {
    if (/^[xy]axis\d*$/.test(key)) {
      copy[key].gridcolor = colour("--grid");
      copy[key].linecolor = colour("--line");
      copy[key].tickcolor = colour("--line");
    }
  }
  return copy;
};

const places = document.querySelectorAll(".plot");
const specOf = (place) => specs[place.dataset.figure];
// Plotly's script is packed too: that makes the page half as large, and it is there as soon.
const plotlyLoaded = places.length > 0 ? inflate("plotly").then((source) => document.head.append(element("script", {}, source))) : null;
plotlyLoaded?.catch(() => document.body.prepend(
  element("p", { class: "warn" }, "Figures and explorer need a browser of 2023 or newer; the tables hold the numbers.")));
const draw = (place) => {
  const spec = specOf(place);
  const ready = drawFitted(place, spec, themed, plotConfig);
  if (drawn.has(place)) return;
  drawn.add(place);
  watched.observe(place);
  // A mark that stands for one feature leads to its card.
  const featureOf = (event) => event.points.map((point) => point.customdata).find(Number.isInteger);
  ready.then(() => {
    place.on("plotly_click", (event) => {
      if (featureOf(event) !== undefined) location.hash = "#feature-" + featureOf(event);
    });
    place.on("plotly_hover", (event) => place.classList.toggle("opens", featureOf(event) !== undefined));
    place.on("plotly_unhover", () => place.classList.remove("opens"));
  });
};
const watched = watchWidth(draw);
const redraw = () => drawn.forEach(draw);
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) {
      watcher.unobserve(entry.target);
      plotlyLoaded.then(() => draw(entry.target));
    }
  }
}, { rootMargin: "800px" });
// Heights come first, so that nothing jumps when figures are drawn.
places.forEach((place) => {
  place.style.minHeight = specOf(place).layout.height + "px";
  watcher.observe(place);
});

// Light or dark: as the system says, until the button says otherwise. Paper is light.
const button = document.createElement("button");
button.type = "button";
button.id = "theme";
const isDark = () => (document.documentElement.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";
const label = () => { button.textContent = isDark() ? "☀ Light" : "☾ Dark"; };
button.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  label();
  redraw();
});
label();
document.body.prepend(button);
let before = null;
window.addEventListener("beforeprint", () => {
  before = document.documentElement.dataset.theme || "";
  document.documentElement.dataset.theme = "light";
  document.body.classList.add("paper"); // as wide as paper, so that figures are
  if (window.Plotly) places.forEach(draw);
});
window.addEventListener("afterprint", () => {
  if (before) document.documentElement.dataset.theme = before;
  else delete document.documentElement.dataset.theme;
  document.body.classList.remove("paper");
  redraw();
});
prefersDark.addEventListener("change", () => { label(); redraw(); });

// A word explains itself where it is pointed at or focused: what the glossary says of it, in a box that Escape closes.
const tip = element("div", { id: "tip", role: "tooltip", hidden: "" });
document.body.append(tip);
const hideTip = () => { tip.hidden = true; };
const showTip = (event) => {
  const word = event.target.closest?.(".term, [data-term]");
  const key = word && (word.dataset.term || word.hash.replace("#term-", ""));
  const said = key && document.querySelector(`#term-${key} dd`);
  if (!said) return;
  tip.textContent = said.textContent;
  tip.hidden = false;
  word.setAttribute("aria-describedby", "tip");
  const box = word.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(box.left, window.innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${window.scrollY + (box.bottom + 4 + tip.offsetHeight > window.innerHeight ? box.top - tip.offsetHeight - 4 : box.bottom + 4)}px`;
};
for (const name of ["pointerover", "focusin"]) document.addEventListener(name, showTip);
for (const name of ["pointerout", "focusout"]) document.addEventListener(name, hideTip);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

// A row of a table that names one feature opens its card wherever it is clicked.
document.addEventListener("click", (event) => {
  const row = event.target.closest("main tbody tr:has(span.feature)");
  const features = row ? row.querySelectorAll("span.feature") : [];
  if (features.length !== 1 || event.target.closest("a, summary, button") || String(getSelection())) return;
  location.hash = "#feature-" + features[0].dataset.feature;
});

// The table of contents marks the section that is on the screen.
const contents = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
const reading = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) contents.get(target.id)?.setAttribute("aria-current", "true");
    else contents.get(target.id)?.removeAttribute("aria-current");
  }
}, { rootMargin: "-30% 0px -69% 0px" });
for (const section of document.querySelectorAll("main > section")) reading.observe(section);

// Figures grow when they are drawn: until then, and until the reader does something else, a link's goal is kept in place.
let goal = null;
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#']");
  const mine = link && document.getElementById(link.hash.slice(1));
  goal = mine;
  setTimeout(() => { if (goal === mine) goal = null; }, 4000);
});
for (const name of ["wheel", "touchmove", "keydown"]) document.addEventListener(name, () => { goal = null; }, { passive: true });
new ResizeObserver(() => goal?.scrollIntoView({ behavior: "instant" })).observe(document.body);
