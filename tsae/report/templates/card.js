// The card of a feature: its effects with intervals, how it is distributed, what it writes, and examples.
const AROUND = [40, 24]; // tokens shown before and after the strongest one until an example is unfolded
const TOKEN_LIMIT = 300; // characters of one token shown until then
const CONTROLS = ["length", "position", "token"];
const OUTCOMES = { success: "✓ success", failure: "✗ failure" };
const GROUPS = { strongest: "Strongest", "90–100 %": "Top tenth of the rest", "50–90 %": "Above the median", "0–50 %": "Below the median" };

const makeCard = async (data, feature) => {
  const chunk = data.columns.chunk ? data.columns.chunk[feature] : -1;
  const { columns, numbers, info } = data;
  const [trajectories, examples, refused] = info.asks ? await asked(feature) : chunk < 0 ? [] : await Promise.all([unpack("trajectories"), unpack("examples-" + chunk)]);
  const steps = info.steps ? (await unpack("steps"))[feature] : null;
  const share = numbers.share ? `${percentText(numbers.share[feature])} % of its activation` : null;
  const place = info.order.indexOf(feature);
  const step = (to, text) => (info.order[to] === undefined ? null : element("a", { href: "#feature-" + info.order[to] }, text));
  const facts = [
    `${columns.group[feature]}-level`,
    `active on ${percentText(numbers.firing_rate[feature])} % of ${info.span} tokens`,
    numbers.thinking_share ? `${percentText(numbers.thinking_share[feature])} % of its activation in responses on thinking` : null,
    numbers.stability ? `stability ${numberText(numbers.stability[feature])}` : null,
    columns.family ? (columns.family[feature] === "none" ? "no family" : `family ${columns.family[feature]} (${percentText(numbers.family_share[feature])} % of its activation)`) : null,
    `${percentText(numbers.top_token_share[feature])} % on its top token`,
    `ρ with response length ${numberText(numbers.length_correlation[feature], true)}`,
    info.inserted[feature],
  ];
  return element("article", { class: "card", id: "feature-" + feature, "aria-label": "Feature " + feature },
    element("p", { class: "steps" }, played(feature), place >= 0 ? step(place - 1, "← previous") : null, place >= 0 ? step(place + 1, "next →") : null),
    element("h3", {}, `Feature ${feature}: `, element("bdi", {}, columns.responds[feature]), share ? element("small", {}, ` ${share}`) : null),
    labelled(data, feature),
    element("p", { class: "quiet" }, facts.filter(Boolean).join("; ")),
    ...columns.flags[feature].map((flag) => element("p", { class: "flag" }, element("strong", { class: "warn" }, flag), " " + info.flag_words[flag])),
    ...effectTables(data, feature),
    pushedBy(document.getElementById("part-pushed") && (await unpack("pushed"))[feature]),
    element("div", { class: "halves" },
      element("div", {}, element("div", { class: "about" }, histogram(data, feature), words(data, feature)), ...(steps ? alongSteps(steps) : [])),
      element("div", {}, ...shown(trajectories, examples, feature, info, refused))),
  );
};

// Where `tsae serve` has a playground, its page links to that.
const played = (feature) => document.querySelector("[href='/playground']") && element("a", { href: "/playground?feature=" + feature }, "playground");

// What `tsae explain` says of a feature; nothing where it was not asked about it.
const labelled = (data, feature) => {
  const score = data.numbers.label_score ? data.numbers.label_score[feature] : null;
  if (score === null) return null;
  const label = data.columns.label[feature];
  const tested = `score ${numberText(score)} on other problems' contexts, where 0.5 says nothing`;
  return element("p", {}, label ? element("strong", {}, element("bdi", {}, label)) : "Unlabelled",
    element("small", {}, label ? ` (label by ${data.info.labeller}; ${tested})` : ` (the label by ${data.info.labeller} does not hold; ${tested})`));
};

// A page of `tsae serve` has no examples of its own: [trajectories, examples], or why there are none.
const asked = async (feature) => {
  try {
    const answer = await fetch("/examples/" + feature);
    return answer.ok ? await answer.json() : [null, null, await answer.text()];
  } catch {
    return [null, null, "The server does not answer: start tsae serve again."];
  }
};

const words = (data, feature) => {
  const { columns, info } = data;
  const tokens = (list, by) => list.flatMap((token, i) => [element("code", {}, token), by ? element("small", {}, ` ${numberText(by[i], true)} `) : " "]);
  const rows = [["Top tokens", tokens(columns.tokens[feature].slice(0, 8))]];
  if (columns.promotes) {
    rows.push(["Promotes", tokens(columns.promotes[feature].slice(0, 6), columns.promotes_by[feature])]);
    rows.push(["Suppresses", tokens(columns.suppresses[feature].slice(0, 6), columns.suppresses_by[feature])]);
  }
  const note = columns.promotes
    ? "Logits per unit of activation by the direct path, W_dec · W_U behind the final norm's weight, against the mean over the vocabulary; later blocks are left out."
    : `No logit effect. ${info.no_logits}`;
  return element("div", {},
    element("dl", {}, ...rows.flatMap(([name, cells]) => [element("dt", {}, name), element("dd", {}, ...cells)])),
    element("p", { class: "quiet" }, note));
};

const histogram = (data, feature) => {
  if (!data.histogram) return null;
  const counts = data.histogram[feature], top = data.maximum[feature];
  const total = counts.reduce((sum, n) => sum + n, 0), most = Math.max(...counts);
  if (!total) return element("p", { class: "quiet" }, "Never active on the counted tokens.");
  const [width, height] = [240, 84];
  // Square roots keep rare strong activations visible.
  const bars = counts.map((n, i) => {
    const tall = n ? Math.max(1.5, height * Math.sqrt(n / most)) : 0;
    return svg("rect", { x: (i * width) / counts.length + 0.5, y: height - tall, width: width / counts.length - 1, height: tall },
      svg("title", {}, `${numberText((i * top) / counts.length)} to ${numberText(((i + 1) * top) / counts.length)}: ${countText(n, "token")}`));
  });
  let below = 0, half = 0;
  while (below + counts[half] < total / 2) below += counts[half++];
  const label = `Histogram of activation on ${countText(total, "active token")}, from 0 to ${numberText(top)}; the median lies between ${numberText((half * top) / counts.length)} and ${numberText(((half + 1) * top) / counts.length)}.`;
  return element("figure", { class: "histogram" },
    svg("svg", { viewBox: `0 0 ${width} ${height + 16}`, role: "img", "aria-label": label }, ...bars,
      svg("line", { x1: 0, x2: width, y1: height, y2: height }),
      svg("text", { x: 0, y: height + 13 }, "0"), svg("text", { x: width, y: height + 13, "text-anchor": "end" }, numberText(top))),
    element("figcaption", {}, `Activation on ${countText(total, "active token")} (heights are square roots)`));
};

// All problems first: what does not fit a screen opens on a click.
const effectTables = (data, feature) => {
  const whole = [], rest = [];
  data.info.contrasts.forEach((contrast, i) => {
    const at = (data.effects[i].feature || []).indexOf(feature);
    if (at >= 0) (contrast.whole ? whole : rest).push([contrast, data.effects[i], at]);
  });
  if (!whole.length && !rest.length) return [element("p", { class: "quiet" }, "It was tested in no contrast: too few problems activate it.")];
  return [
    whole.length ? effectTable(data, `All problems: shift against ${data.info.base}, and success − failure`, whole, true) : null,
    rest.length ? element("details", {}, element("summary", {}, "By band, part and outcome, other readers, interactions"), effectTable(data, "Further effects", rest, false)) : null,
  ];
};

// What training samples did to a feature that was attributed, and the samples that raised and lowered it most.
const pushedBy = (found, feature = "it") => found && element("details", {}, element("summary", {}, `Training samples that pushed ${feature}`),
  element("p", {}, found.told),
  element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Samples with the largest shares" }, element("table", {},
    element("thead", {}, element("tr", {}, ...found.head.map((text, i) => element("th", { scope: "col", class: i === 1 || i === 4 ? null : "n" }, text)))),
    element("tbody", {}, ...found.rows.map((row) => element("tr", {}, ...row.map((text, i) => element("td", { class: i === 1 || i === 4 ? null : "n" }, text))))))));

const term = (key, text) => element("a", { class: "term", href: "#term-" + key }, text);

// What became of a shift under the controls.
const verdict = (lost) => {
  if (lost & 16) return element("td", { class: "good" }, "✓ survives");
  const names = CONTROLS.filter((_, i) => lost & (1 << i));
  const said = [names.length ? "not beyond " + names.join(", ") : "", lost & 8 ? "length cannot tell" : ""];
  return element("td", { class: "warn" }, said.filter(Boolean).join("; "));
};

// One scale for all rows, so that runs and bands can be compared.
const effectTable = (data, caption, rows, whole) => {
  const ends = rows.flatMap(([, effect, at]) => [effect.delta_low[at], effect.delta_high[at], effect.delta[at], 0]).filter((x) => x != null);
  const low = Math.min(...ends), span = Math.max(...ends) - low || 1;
  const x = (value) => 5 + (130 * (value - low)) / span;
  const lines = [];
  let block = null;
  for (const [contrast, effect, at] of rows) {
    if (!whole && contrast.block !== block) {
      block = contrast.block;
      lines.push(element("tr", { class: "block" }, element("th", { scope: "rowgroup", colspan: 7 }, block)));
    }
    const change = effect.delta[at];
    const tone = effect.q[at] <= data.info.q ? (change > 0 ? "up" : "down") : "still";
    const name = !whole ? contrast.where : contrast.kind === "shift" ? contrast.block : `success − failure, ${contrast.block}`;
    lines.push(element("tr", {},
      element("th", { scope: "row" }, name),
      element("td", { class: "n" }, element("span", { class: tone }, { up: "▲ ", down: "▼ ", still: DOT + " " }[tone] + numberText(change, true)), " ",
        element("small", {}, intervalText(effect.delta_low[at], effect.delta_high[at], change))),
      tone === "still" ? element("td", {}) : verdict(effect.lost[at]),
      element("td", { class: "n", "data-head": "AUROC" }, effect.auroc[at] === null ? "" : effect.auroc[at].toFixed(2)),
      element("td", { class: "bar" }, svg("svg", { viewBox: "0 0 140 14", class: "interval " + tone, "aria-hidden": "true" },
        svg("line", { class: "zero", x1: x(0), x2: x(0), y1: 0, y2: 14 }),
        svg("line", { x1: x(effect.delta_low[at] ?? change), x2: x(effect.delta_high[at] ?? change), y1: 7, y2: 7 }),
        svg("circle", { cx: x(change), cy: 7, r: 3.5 }))),
      element("td", { class: "n", "data-head": "q" }, qText(effect.q[at])),
      element("td", { class: "n", "data-head": "active in" }, effect.active[at] === null ? `${numberText(effect.reference[at])} → ${numberText(effect.mean[at])}` : `${percentText(effect.active_reference[at])} → ${percentText(effect.active[at])} %`)));
  }
  const column = (text, kind) => element("th", { scope: "col", class: kind }, text);
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    element("table", { class: "effects" }, element("caption", {}, caption),
      element("thead", {}, element("tr", {}, element("td", {}), column(term("delta", "Δ [interval]"), "n"), column(term("survivors", "controls")),
        column(term("auroc", "AUROC"), "n"), element("td", { class: "bar" }), column(term("q", "q"), "n"), column("active in", "n"))),
      element("tbody", {}, ...lines)));
};

// A line a run: the shift at every step with its interval, on one scale.
const alongSteps = (runs) => {
  const ends = runs.flatMap(([, , , , , low, high]) => [...low, ...high, 0]).filter((x) => x != null);
  const least = Math.min(...ends), span = Math.max(...ends) - least || 1;
  const [width, height] = [170, 64];
  const y = (value) => 4 + (height - 8) * (1 - (value - least) / span);
  const pictures = runs.map(([run, kind, onset, steps, shift, low, high]) => {
    const x = (i) => 4 + ((width - 8) * (steps[i] - steps[0])) / (steps[steps.length - 1] - steps[0] || 1);
    const last = steps.length - 1;
    const said = `${run}: ${kind}${onset == null ? "" : `, onset at step ${onset}`}`;
    const label = `${said}. Shift ${steps.map((step, i) => `${numberText(shift[i], true)} at step ${step}`).join(", ")}.`;
    return element("figure", { class: "step" },
      svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
        svg("line", { class: "zero", x1: 0, x2: width, y1: y(0), y2: y(0) }),
        ...steps.map((_, i) => svg("line", { x1: x(i), x2: x(i), y1: y(low[i] ?? shift[i]), y2: y(high[i] ?? shift[i]) })),
        svg("polyline", { points: shift.map((value, i) => `${x(i)},${y(value)}`).join(" ") }),
        ...shift.map((value, i) => svg("circle", { cx: x(i), cy: y(value), r: 2.6 }, svg("title", {}, `step ${steps[i]}: ${numberText(value, true)}`)))),
      element("figcaption", {}, `${said}; ${numberText(shift[last], true)} at step ${steps[last]}`));
  });
  return [element("h4", {}, "Along the steps"), element("div", { class: "stepped" }, ...pictures)];
};

// The first pair is open; the rest opens on a click.
const shown = (trajectories, examples, feature, info, refused) => {
  if (!examples) {
    const why = refused || info.no_examples || (info.order.includes(feature) ? "This file has no room for examples of weaker features." : "It is never active.");
    return [element("p", { class: "quiet" }, "No examples. " + why)];
  }
  const [maximum, groups] = examples[feature];
  const sets = groups.flatMap(([name, found]) => {
    const size = name === "pairs" ? 2 : found.length;
    return Array.from({ length: found.length / size }, (_, i) => [name === "pairs" ? "The same problem, solved and failed" : GROUPS[name], found.slice(i * size, (i + 1) * size)]);
  });
  const [first, ...others] = sets.map(([title, found]) => [element("h4", {}, title), element("div", { class: "pair" }, ...found.map((one) => example(trajectories, one, maximum)))]);
  const more = sets.slice(1).reduce((n, [, found]) => n + found.length, 0);
  return [...first, more ? element("details", {}, element("summary", {}, countText(more, "more example")), ...others.flat()) : null];
};

const example = (data, found, maximum) => {
  const [trajectory, reader, , , , value] = found;
  const [problem, policy, outcome] = data.trajectories[trajectory];
  const read = data.readers[reader] === policy ? "" : `, read by ${data.readers[reader]}`;
  const body = element("div", { class: "tokens", dir: "ltr" });
  const head = element("p", { class: "quiet" },
    element("span", { class: "outcome " + (outcome in OUTCOMES ? outcome : "") }, OUTCOMES[outcome] || "? outcome unknown"),
    " ", element("bdi", {}, problem), `, by `, element("bdi", {}, policy + read), value ? `; strongest ${numberText(value)} ` : "; not active ");
  const cut = writeTokens(body, data, found, maximum, false);
  if (cut) {
    const button = element("button", { type: "button", class: "unfold", "aria-expanded": "false" }, "unfold");
    button.addEventListener("click", () => {
      const whole = button.getAttribute("aria-expanded") === "false";
      writeTokens(body, data, found, maximum, whole);
      button.setAttribute("aria-expanded", String(whole));
      button.textContent = whole ? "fold" : "unfold";
    });
    head.append(button);
  }
  return element("div", { class: "example" }, head, body);
};

// Writes the tokens around the strongest one, or all that the file has; says whether that leaves something out.
const writeTokens = (place, data, found, maximum, whole) => {
  const [trajectory, , strongest, start, stop, , gaps, levels] = found;
  const [, , , prompt, length, segments] = data.trajectories[trajectory];
  const [base, ids] = segments.find(([first, tokens]) => first <= start && stop <= first + tokens.length);
  const from = whole ? start : Math.max(start, strongest - AROUND[0]);
  const to = whole ? stop : Math.min(stop, strongest + AROUND[1]);
  const level = new Map();
  let at = start;
  gaps.forEach((gap, i) => {
    at += gap;
    level.set(at, levels[i]);
  });
  let cut = from > start || to < stop;
  const parts = from > 0 ? [element("span", { class: "cut" }, whole ? `… ${countText(from, "token")} before … ` : "… ")] : [];
  for (let i = from; i < to; i++) {
    if (i === prompt && i > from) parts.push(element("span", { class: "turn", title: "the response starts here" }, "▸"));
    let text = data.strings[ids[i - base]];
    if (!whole && text.length > TOKEN_LIMIT) {
      cut = true;
      text = `${text.slice(0, TOKEN_LIMIT)}… (${countText(text.length, "character")})`;
    }
    const pieces = text.split("\n").flatMap((piece, n) => (n ? [element("span", { class: "break" }, "⏎"), "\n", piece] : [piece]));
    if (level.has(i)) {
      const heat = level.get(i);
      parts.push(element("mark", { class: "a" + Math.min(9, 1 + Math.floor(heat / 11)), title: numberText((heat * maximum) / 99) }, ...pieces));
    } else parts.push(...pieces);
  }
  if (to < length) parts.push(element("span", { class: "cut" }, whole ? ` … ${countText(length - to, "token")} after …` : " …"));
  place.replaceChildren(...parts);
  place.normalize();
  return cut;
};
