// The explorer: which features match, in which order, and the card of the one that the address names.
const PAGE_ROWS = 20;

const startExplorer = async () => {
  const frame = document.getElementById("explorer");
  if (!frame) return;
  const data = await unpack("features");
  const box = frame.querySelector(".filters");
  const state = { sort: "auroc", down: true, page: 0, open: null };
  const controls = Object.fromEntries([...box.querySelectorAll("[name]")].map((control) => [control.name, control]));
  const value = (name) => (controls[name] ? controls[name].value : "");
  const places = data.effects.map((effect) => new Map((effect.feature || []).map((feature, i) => [feature, i])));
  const active = data.info.order.slice().sort((a, b) => a - b);

  // What a row says of a feature in the chosen contrast; null where it was not tested there.
  const rowOf = (feature, chosen) => {
    const at = places[chosen] ? places[chosen].get(feature) : undefined;
    const effect = data.effects[chosen];
    const stability = data.numbers.stability ? data.numbers.stability[feature] : null;
    const described = { feature, responds: data.columns.responds[feature], stability };
    if (at === undefined) return { ...described, delta: null, auroc: null, q: null, apart: null };
    const [delta, auroc, q] = [effect.delta[at], effect.auroc[at], effect.q[at]];
    const survives = Boolean(effect.lost[at] & 16) && q <= data.info.q;
    // Features that survive all controls come first, then the others that moved, each by how well they tell both sides apart.
    return { ...described, delta, auroc, q, survives, apart: Math.abs(auroc - 0.5) + (survives ? 2 : q <= data.info.q ? 1 : 0) };
  };

  const matching = () => {
    const chosen = Number(value("contrast") || 0);
    const words = value("text").toLowerCase().split(/\s+/).filter(Boolean);
    const q = value("q") === "" ? 1 : Number(value("q"));
    const least = Number(value("delta") || 0);
    const direction = Number(value("direction") || 0);
    const stable = Number(value("stability") || 0);
    const { group, responds, tokens, label, family, flags } = data.columns;
    const found = active.map((feature) => rowOf(feature, chosen)).filter((row) => {
      const text = `${row.feature} ${responds[row.feature]} ${label ? label[row.feature] : ""} ${tokens[row.feature].join(" ")}`.toLowerCase();
      return (
        (row.q === null ? q >= 1 && !least && !direction : row.q <= q && Math.abs(row.delta) >= least) &&
        (!direction || Math.sign(row.delta) === direction) &&
        (!value("group") || group[row.feature] === value("group")) &&
        (!value("family") || family[row.feature] === value("family")) &&
        (!stable || row.stability >= stable) &&
        !(controls.clean.checked && flags[row.feature].length) &&
        words.every((word) => (/^\d+$/.test(word) ? String(row.feature) === word || text.includes(word) : text.includes(word)))
      );
    });
    const key = (row) => (state.sort === "delta" ? row.delta === null ? null : Math.abs(row.delta) : row[state.sort === "auroc" ? "apart" : state.sort]);
    const order = state.down ? -1 : 1;
    return found.sort((a, b) => {
      const one = key(a), other = key(b);
      if (one === null || other === null) return (one === null) - (other === null) || a.feature - b.feature;
      return (one < other ? -order : one > other ? order : 0) || Math.abs(b.delta) - Math.abs(a.delta) || a.feature - b.feature;
    });
  };

  const columns = [
    ["feature", "Feature"],
    ["responds", "Responds to"],
    ["auroc", "AUROC", "auroc"],
    ["delta", "Δ", "delta"],
    ["q", "q", "q"],
    ...(data.numbers.stability ? [["stability", "Stability", "stability"]] : []),
  ];

  const head = () =>
    element("tr", {}, ...columns.map(([name, title, explained]) => {
      const sorted = state.sort === name ? (state.down ? "descending" : "ascending") : null;
      const button = element("button", { type: "button", class: "sort", "data-term": explained }, title + (sorted ? (state.down ? " ▾" : " ▴") : ""));
      button.addEventListener("click", () => {
        state.down = state.sort === name ? !state.down : name === "delta" || name === "auroc";
        state.sort = name;
        state.page = 0;
        list();
        frame.querySelector(`th[data-name="${name}"] button`).focus();
      });
      return element("th", { scope: "col", "aria-sort": sorted, "data-name": name, class: name === "feature" || name === "responds" ? null : "n" }, button);
    }));

  const line = (row) => {
    const kind = row.q !== null && row.q <= data.info.q ? (row.delta > 0 ? "up" : "down") : "still";
    const arrow = { up: "▲ ", down: "▼ ", still: DOT + " " }[kind];
    const link = element("a", { href: "#feature-" + row.feature }, String(row.feature));
    const flags = data.columns.flags[row.feature];
    const label = data.columns.label ? data.columns.label[row.feature] : "";
    const line = element("tr", { class: row.feature === state.open ? "open" : null },
      element("th", { scope: "row" }, link),
      element("td", {}, element("bdi", {}, row.responds), label ? element("bdi", {}, element("small", {}, ` ${label}`)) : null, row.survives ? element("small", { class: "good" }, " ✓ survives") : null, flags.length ? element("small", { class: "warn" }, " " + flags.join(", ")) : null),
      element("td", { class: "n" }, row.auroc === null ? "" : row.auroc.toFixed(2)),
      element("td", { class: "n " + kind }, row.delta === null ? "not tested" : arrow + numberText(row.delta, true)),
      element("td", { class: "n" }, row.delta === null ? "" : qText(row.q)),
      data.numbers.stability ? element("td", { class: "n" }, numberText(row.stability)) : null);
    line.addEventListener("click", () => { location.hash = "feature-" + row.feature; });
    return line;
  };

  const list = () => {
    const found = matching();
    const pages = Math.max(1, Math.ceil(found.length / PAGE_ROWS));
    state.page = Math.min(state.page, pages - 1);
    const contrast = data.info.contrasts[Number(value("contrast") || 0)];
    const refused = contrast?.refused ? ` This contrast was refused: ${contrast.refused}.` : "";
    document.getElementById("found").textContent = `${countText(found.length, "feature")} of ${active.length.toLocaleString("en-US")} active ones.${refused}`;
    frame.querySelector("thead").replaceChildren(head());
    frame.querySelector("tbody").replaceChildren(...found.slice(state.page * PAGE_ROWS, (state.page + 1) * PAGE_ROWS).map(line));
    document.getElementById("page").textContent = `${state.page + 1} of ${pages}`;
    document.getElementById("earlier").disabled = state.page === 0;
    document.getElementById("later").disabled = state.page === pages - 1;
    frame.querySelector(".pages").hidden = pages === 1;
  };

  const open = async (feature) => {
    state.open = feature;
    list();
    const card = await makeCard(data, feature);
    // Another one may have been asked for meanwhile.
    if (state.open === feature) document.getElementById("card").replaceChildren(card);
  };

  // #feature-412 opens a feature's card, from any link of this page or another.
  const follow = async () => {
    const named = /^#feature-(\d+)$/.exec(location.hash);
    if (!named || !(Number(named[1]) < data.columns.group.length)) return false;
    await open(Number(named[1]));
    const card = document.getElementById("card");
    const narrow = window.matchMedia("(max-width: 1000px)").matches;
    const box = card.getBoundingClientRect();
    if (narrow || box.top < 0 || box.top > 0.6 * window.innerHeight) card.scrollIntoView({ block: "start", behavior: "instant" });
    card.focus({ preventScroll: true });
    return true;
  };

  const filter = () => { state.page = 0; list(); };
  box.addEventListener("input", filter);
  document.getElementById("reset").addEventListener("click", () => {
    for (const control of Object.values(controls)) {
      if (control.tagName === "SELECT") control.selectedIndex = 0;
      else [control.value, control.checked] = [control.defaultValue, control.defaultChecked];
    }
    filter();
  });
  document.getElementById("earlier").addEventListener("click", () => { state.page--; list(); });
  document.getElementById("later").addEventListener("click", () => { state.page++; list(); });
  window.addEventListener("hashchange", follow);
  frame.hidden = false;
  document.getElementById("explorer-waits").remove();
  // A feature's number anywhere on the page leads to its card.
  for (const place of document.querySelectorAll("span.feature")) {
    place.replaceChildren(element("a", { href: "#feature-" + place.dataset.feature }, place.textContent));
  }
  if (!(await follow())) {
    list();
    const [first] = matching();
    if (first || data.info.order.length) await open(first ? first.feature : data.info.order[0]);
  }
  frame.dataset.ready = "yes";
};
