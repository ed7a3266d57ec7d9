// One problem as the base and a run answer it, success beside failure; tokens have the colour of the features that are active.
const startShow = async () => {
  const place = document.getElementById("shown");
  if (!place) return;
  const data = await unpack("problems");
  const pushed = document.getElementById("part-pushed") ? await unpack("pushed") : {};
  const [run, problem, colour] = place.querySelectorAll("select");
  const options = (select, texts) => select.replaceChildren(...texts.map((text, i) => element("option", { value: i }, text)));
  const often = ([right, n, responses]) => (responses.some(([outcome]) => outcome !== "unknown") ? `${right} of ${n} right` : countText(n, "response"));
  const chosen = () => {
    const [name, signs, survive] = data.runs[run.value || 0];
    const shown = Number(colour.value || 0);
    return { name, signs, survive, colours: new Map(shown ? [signs[shown - 1]] : signs) };
  };

  const tokens = (ids, marks, colours, length) => {
    const strongest = new Map();
    for (let i = 0; i < marks.length; i += 3) {
      const [token, feature, level] = marks.slice(i, i + 3);
      if (!colours.has(feature)) continue;
      const known = strongest.get(token) || { level: 0, all: [] };
      known.all.push(`${feature} “${data.features[feature][1]}” ${numberText((level * data.features[feature][0]) / 99)}`);
      if (level > known.level) Object.assign(known, { level, feature });
      strongest.set(token, known);
    }
    const parts = ids.map((id, i) => {
      const whole = data.strings[id], found = strongest.get(i);
      const text = (whole.length > TOKEN_LIMIT ? `${whole.slice(0, TOKEN_LIMIT)}…` : whole).replaceAll("\n", "⏎\n");
      if (!found) return text;
      const depth = "a" + Math.min(9, 1 + Math.floor(found.level / 11)) + (colours.get(found.feature) < 0 ? " against" : "");
      return element("mark", { class: depth, title: found.all.join("; "), "data-feature": found.feature }, text);
    });
    if (length > ids.length) parts.push(element("span", { class: "cut" }, ` … ${countText(length - ids.length, "token")} after …`));
    return element("div", { class: "tokens", dir: "auto" }, ...parts);
  };

  const write = () => {
    const { name, signs, survive, colours } = chosen();
    const [, , prompt, answers] = data.problems[problem.value || 0];
    const side = (sign) => signs.filter(([, of]) => of === sign).flatMap(([feature], i) => [i ? ", " : "", element("a", { href: "#feature-" + feature }, String(feature)), " ", element("bdi", {}, data.features[feature][1])]);
    const none = signs.length ? [] : ["No feature moved: no token has a colour."];
    const sides = [[1, "Orange", "raised"], [-1, "Blue", "lowered"]].filter(([sign]) => side(sign).length)
      .flatMap(([sign, ink, did]) => [element("strong", { class: sign > 0 ? "up" : "down" }, ink), `: features that ${name} ${did}: `, ...side(sign), ". "]);
    document.getElementById("legend").replaceChildren(...none, ...sides, signs.length ? (survive ? "They survive all controls." : "None survives all controls: these moved most clearly.") : "");
    const columns = [data.base, name].filter((who) => answers[who]);
    const outcomes = ["success", "failure", "unknown"].filter((outcome) => columns.some((who) => answers[who][2].some(([of]) => of === outcome)));
    const cell = (who, outcome) => {
      const found = answers[who][2].find(([of]) => of === outcome);
      const head = element("p", { class: "quiet" }, element("strong", {}, element("bdi", {}, who)), " ", element("span", { class: "outcome " + outcome }, OUTCOMES[outcome] || ""), ` (${often(answers[who])})`);
      const text = found ? tokens(found[2], found[3], colours, found[1]) : element("p", { class: "quiet" }, `No ${outcome} among its ${countText(answers[who][1], "response")}.`);
      return element("div", { class: "example" }, head, text);
    };
    document.getElementById("answers").replaceChildren(...(prompt ? [element("div", { class: "tokens prompt", dir: "auto" }, prompt)] : []),
      element("div", { class: "pair" }, ...columns.map((who) => element("div", {}, ...outcomes.map((outcome) => cell(who, outcome))))));
    const known = signs.filter(([feature]) => pushed[feature]).map(([feature]) => pushedBy(pushed[feature], `feature ${feature}, ${data.features[feature][1]}`));
    const others = Object.keys(pushed).flatMap((feature, i) => [i ? ", " : "", element("a", { href: "#feature-" + feature }, feature)]);
    const instead = others.length ? [element("p", { class: "quiet" }, "The training samples of other features are known: the cards of ", ...others, " list them.")] : [];
    document.getElementById("pushed").replaceChildren(...(known.length ? known : instead));
  };

  const fill = () => {
    const { name, signs } = chosen();
    const mine = data.problems.map(([title, band, , answers]) => `${title}${band && band !== "None" ? ` (${band})` : ""}` + [data.base, name].filter((who) => answers[who]).map((who) => `, ${who} ${often(answers[who])}`).join(""));
    options(problem, mine);
    // The one whose solve rate changed most.
    const change = ({ [data.base]: before, [name]: after }) => (before && after ? Math.abs(after[0] / after[1] - before[0] / before[1]) : 0);
    const changes = data.problems.map(([, , , answers]) => change(answers));
    problem.value = changes.indexOf(Math.max(...changes));
    colour.closest("label").hidden = !signs.length;
    options(colour, [`all ${signs.length} features`, ...signs.map(([feature, sign]) => `${feature} ${data.features[feature][1]} (${sign > 0 ? "raised" : "lowered"})`)]);
    write();
  };
  options(run, data.runs.map(([name]) => name));
  const surviving = data.runs.map(([, signs, survive]) => (survive ? signs.length : 0));
  run.value = surviving.indexOf(Math.max(...surviving));
  run.closest("label").hidden = data.runs.length === 1;
  run.addEventListener("input", () => { colour.value = 0; fill(); });
  problem.addEventListener("input", write);
  colour.addEventListener("input", write);
  place.addEventListener("click", (event) => {
    const mark = event.target.closest("mark");
    if (mark) location.hash = "#feature-" + mark.dataset.feature;
  });
  fill();
  place.hidden = false;
};
