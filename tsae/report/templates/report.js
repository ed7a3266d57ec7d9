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

const specOf = (place) => specs[place.dataset.figure];
// Plotly's script is packed too: that makes the page half as large, and it is there as soon.
const plotlyLoaded = inflate("plotly").then((source) => document.head.append(element("script", {}, source)));
plotlyLoaded.catch(() => document.body.prepend(
  element("p", { class: "warn" }, "Figures and explorer need a browser of 2023 or newer; the tables hold the numbers.")));
const draw = (place) => {
  const spec = specOf(place);
  const ready = drawFitted(place, spec, themed, plotConfig);
  if (drawn.has(place)) return;
  drawn.add(place);
  watched.observe(place);
  // A mark that stands for one feature leads to its card.
  ready.then(() => place.on("plotly_click", (event) => {
    const feature = event.points[0].customdata;
    if (Number.isInteger(feature)) location.hash = "#feature-" + feature;
  }));
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
const places = document.querySelectorAll(".plot");
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
  if (window.Plotly) places.forEach(draw);
});
window.addEventListener("afterprint", () => {
  if (before) document.documentElement.dataset.theme = before;
  else delete document.documentElement.dataset.theme;
  redraw();
});
prefersDark.addEventListener("change", () => { label(); redraw(); });
