// Arranges a figure's panels for the width of its place, so that all text has room. `layout.meta` (figures/layout.py)
// names the panels: columns of `heights.length` panels, one column for every title, `columns` of them beside each other.
const LINE = 1.3;
const pen = document.createElement("canvas").getContext("2d");
const textWidth = (text, size, bold, family) => {
  pen.font = `${bold ? "bold " : ""}${size}px ${family}`;
  return pen.measureText(text.replace(/<[^>]*>/g, "").replace(/&#?\w+;/g, "&")).width;
};

// The text in lines of at most `room` pixels, at most `most` of them; what is left out becomes an ellipsis.
const wrapped = (text, room, size, family, most = 3) => text.split("<br>").map((line) => {
  const bold = line.includes("<b>");
  const fits = (atoms) => textWidth(atoms.join("").trimEnd(), size, bold, family) <= room;
  const lines = [[]];
  for (const atom of line.match(/<[^>]*>|&#?\w+;|[^<&]/gu) || []) {
    const current = lines.at(-1);
    current.push(atom);
    if (atom.startsWith("<") || fits(current)) continue;
    const start = current.findLastIndex((a, i) => i < current.length - 1 && i > 2 && /^[\s/_,:-]$/.test(a)) + 1;
    lines.push(current.splice(start || current.length - 1));
  }
  if (lines.length > most) {
    const rest = lines.splice(most).flat().filter((atom) => atom.startsWith("<"));
    const last = lines.at(-1);
    while (last.length && !fits([...last, "…"])) last.pop();
    last.push("…", ...rest);
  }
  return lines.map((atoms) => atoms.join("").trim()).join("<br>");
}).join("<br>");

const countLines = (text) => (text ? text.split("<br>").length : 0);

// {data, layout} of the figure for a width; `legends` are the heights of its legends in pixels.
const fitted = (spec, width, legends) => {
  const plan = spec.layout.meta;
  if (!plan?.heights) return spec;
  const layout = structuredClone(spec.layout);
  const family = layout.font.family;
  const per = plan.heights.length;
  const items = plan.titles.map((_, i) => i);
  const name = (kind, i, p) => {
    const number = (Math.floor(i / plan.columns) * per + p) * plan.columns + (i % plan.columns) + 1;
    return `${kind}axis${number > 1 ? number : ""}`;
  };
  const panels = items.map((i) => plan.heights.map((height, p) => ({
    x: layout[name("x", i, p)] || {}, y: layout[name("y", i, p)] || {}, height,
  })));
  const widest = (texts, size = 12) => Math.max(0, ...texts.flatMap((text) => text.split("<br>"))
    .map((line) => textWidth(line, size, line.includes("<b>"), family)));

  // Names of rows come first: they decide how much is left for the panels.
  const most = Math.min(250, Math.max(96, 0.34 * width));
  for (const panel of panels.flat()) {
    const labels = panel.y.ticktext;
    if (!labels || panel.y.tickvals.length < labels.length) continue;
    panel.y.ticktext = labels.map((label) => wrapped(label, most, 12, family));
    panel.label = widest(panel.y.ticktext) + 10;
    const lines = Math.max(1, ...panel.y.ticktext.map(countLines));
    panel.height = Math.max(panel.height, labels.length * (lines * 14 + 8));
  }
  const labelRoom = (i) => Math.max(...panels[i].map((panel) => panel.label || spec.layout.margin.l));
  const right = 20;
  const between = 34;
  let columns = plan.columns + 1;
  let lefts;
  let panelWidth;
  do {
    columns -= 1;
    lefts = Array.from({ length: columns }, (_, c) => (c && !plan.own
      ? between : (c && between) + Math.max(...items.filter((i) => i % columns === c || !plan.own).map(labelRoom))));
    panelWidth = (width - right - lefts.reduce((a, b) => a + b)) / columns;
  } while (columns > 1 && panelWidth < plan.least);
  const plotWidth = width - right - lefts[0];
  const startOf = (c) => lefts.slice(1, c + 1).reduce((a, b) => a + b, 0) + c * panelWidth;

  // What stands above and below every panel.
  const yTitles = plan.heights.map((_, p) => items.map((i) => panels[i][p].y.title?.text).find(Boolean) || "");
  const heads = plan.heads.map((head) => wrapped(head, plan.beside ? lefts[0] - 8 : plotWidth, 12, family));
  const titles = plan.titles.map((title) => wrapped(title, panelWidth + (plan.align === "left" ? 8 : 24), plan.size, family));
  for (const i of items) panels[i].forEach((panel, p) => {
    const { x, y } = panel;
    if (plan.pad && p === 0) {
      const beyond = (100 * plan.pad) / (panelWidth - 2 * plan.pad);
      x.range = [-beyond, 100 + beyond];
    }
    const length = x.range && Math.abs(x.range[1] - x.range[0]);
    let ticks = 18;
    if (x.ticktext && x.type !== "log") {
      const widestTick = widest(x.ticktext);
      const steps = length ? length / Math.abs(x.tickvals[1] - x.tickvals[0]) : x.ticktext.length;
      const space = panelWidth / (Number.isFinite(steps) ? steps : 1);
      if (plan.pad && widestTick + 4 > space) x.ticktext = x.ticktext.map((tick, k) => (k % 2 ? "" : tick));
      x.tickangle = plan.pad || widestTick + 6 <= space ? 0 : space > 24 ? -40 : -90;
      ticks = x.tickangle ? (x.tickangle === -90 ? widestTick + 8 : 0.65 * widestTick + 18) : 18;
    } else if (!x.ticktext) {
      x.nticks = Math.max(3, Math.min(x.nticks || 6, Math.floor(panelWidth / 42)));
      if (x.type === "log" && panelWidth < 260) x.dtick = 2;
    }
    if (x.title?.text) x.title.text = wrapped(x.title.text, panelWidth + 24, 12, family);
    panel.above = Math.max(
      p === 0 && titles[i] ? countLines(titles[i]) * plan.size * LINE + 10 : 6,
      heads[p] ? countLines(heads[p]) * 12 * LINE + 8 : 0);
    panel.below = (x.showticklabels === false ? 4 : ticks + 6) + countLines(x.title?.text) * 12 * LINE;
    const first = i % columns === 0;
    // Panels that share the names or numbers of their row share the range, whatever row they are in now.
    if (i && !plan.own) y.matches = name("y", 0, p).replace("axis", "");
    y.showticklabels = first || plan.own;
    y.title = { ...y.title, text: first ? wrapped(yTitles[p], panel.height, 12, family, 2) : "" };
  });

  // Rows of panels, from the top.
  const rows = [];
  let down = 0;
  for (let block = 0; block * columns < items.length; block += 1) {
    const mine = items.slice(block * columns, (block + 1) * columns);
    plan.heights.forEach((_, p) => {
      const tallest = (what) => Math.max(...mine.map((i) => panels[i][p][what]));
      const top = down + tallest("above") + (block && !p ? 14 : 0);
      rows.push({ p, mine, top, bottom: top + tallest("height") });
      down = top + tallest("height") + tallest("below");
    });
  }
  const [above, below] = [rows[0].top, down - rows.at(-1).bottom];
  const plotHeight = rows.at(-1).bottom - above;
  const across = (pixels) => Math.min(1, Math.max(0, pixels / plotWidth));
  const up = (pixels) => Math.min(1, Math.max(0, 1 - (pixels - above) / plotHeight));
  const note = { name: "title", xref: "paper", yref: "paper", yanchor: "bottom", showarrow: false };
  layout.annotations = (layout.annotations || []).filter((annotation) => annotation.name !== "title");
  for (const { p, mine, top, bottom } of rows) {
    for (const i of mine) {
      const start = startOf(i % columns);
      panels[i][p].x.domain = [across(start), across(start + panelWidth)];
      panels[i][p].y.domain = [up(bottom), up(top)];
      if (p || !titles[i]) continue;
      const left = plan.align === "left";
      layout.annotations.push({
        ...note, text: titles[i], font: { size: plan.size }, align: plan.align, xanchor: plan.align, y: up(top),
        x: across(left ? start : start + panelWidth / 2), yshift: left ? 6 : 2,
      });
    }
    if (heads[p]) {
      const place = plan.beside ? { xanchor: "right", align: "right", xshift: -6, yshift: 2 } : { xanchor: "left", align: "left", yshift: 4 };
      layout.annotations.push({ ...note, ...place, text: heads[p], font: { size: 12 }, x: 0, y: up(top) });
    }
  }
  const legendAbove = legends.legend ? legends.legend + 6 : 0;
  const legendBelow = legends.legend2 ? legends.legend2 + 6 : 0;
  layout.margin = { l: lefts[0], r: right, t: above + legendAbove, b: below + legendBelow };
  layout.height = Math.round(down + legendAbove + legendBelow);
  layout.width = width;
  for (const legend of ["legend", "legend2"]) if (layout[legend]) Object.assign(layout[legend], { x: 0, xref: "container", maxheight: 1000 });
  const data = spec.data.map((trace) => (trace.name ? { ...trace, name: wrapped(trace.name, width - 70, 12, family, 2) } : trace));
  return { data, layout };
};

// Draw the figure, and draw it again where its legends turn out to be higher or lower than they were. Then
// `data-fitted` holds the width that it was drawn for.
const drawFitted = async (place, spec, themed, config) => {
  const fits = Boolean(spec.layout.meta?.heights);
  place.style.minWidth = fits ? "0" : "";
  const width = place.clientWidth;
  if (!width) return;
  delete place.dataset.fitted;
  const turn = (place.turn || 0) + 1;
  place.turn = turn;
  // Plotly fails where a legend leaves no height for the panels, so the first guess is high.
  let legends = Object.fromEntries(["legend", "legend2"].filter((name) => spec.layout[name]).map((name) => [name, 150]));
  for (let round = 0; round < 3; round += 1) {
    const { data, layout } = fitted(spec, width, legends);
    place.style.minHeight = `${layout.height}px`;
    // Plotly's own answer to a new width would keep the old margins: `watchWidth` draws again instead.
    await Plotly.react(place, data, themed(layout), { ...config, responsive: !fits && config.responsive });
    if (place.turn !== turn) return; // The width or the colours have changed again.
    const found = {};
    for (const legend of ["legend", "legend2"]) {
      const box = place.querySelector(`.${legend} .bg`);
      if (box) found[legend] = Math.ceil(box.getBBox().height);
    }
    if (JSON.stringify(found) === JSON.stringify(legends)) break;
    legends = found;
  }
  place.dataset.fitted = width;
};

// Calls `redraw` for a place whose width has changed.
const watchWidth = (redraw) => {
  const widths = new WeakMap();
  return new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const known = widths.get(target);
      widths.set(target, target.clientWidth);
      if (known !== undefined && known !== target.clientWidth) redraw(target);
    }
  });
};
