// The playground: asks the server for answers, shows them side by side, and keeps the choices in the address.
const form = document.getElementById("ask");
const [stateLine, failedLine, answersPlace] = ["state", "failed", "answers"].map((id) => document.getElementById(id));
const NUMBERS = ["feature", "amount", "temperature", "seed", "tokens"];
const ASKED = ["prompt", "run", "edit", ...NUMBERS];
const LONGEST_PROMPT = 100; // tokens of a prompt that are shown before an answer
let shownAnswers = null, busy = false;

const field = (name) => form.elements.namedItem(name);
const chosenFeature = () => (field("feature").value === "" ? null : Number(field("feature").value));
const question = () => Object.fromEntries(ASKED.map((name) => {
  const value = field(name).value;
  return [name, NUMBERS.includes(name) ? (value === "" ? null : Number(value)) : value];
}));

const keepInAddress = () => {
  const kept = new URLSearchParams(ASKED.map((name) => [name, field(name).value]).filter(([, value]) => value !== ""));
  history.replaceState(null, "", "?" + kept);
};
const restore = () => {
  field("prompt").value = field("problem").value;
  const kept = new URLSearchParams(location.search);
  for (const name of ASKED) {
    if (!kept.has(name)) continue;
    const before = field(name).value;
    field(name).value = kept.get(name);
    if (field(name).selectedIndex === -1) field(name).value = before; // a run that is no longer there
  }
  matchProblem();
  return kept.has("prompt");
};
const matchProblem = () => {
  const options = [...field("problem").options];
  field("problem").selectedIndex = Math.max(0, options.findIndex((option) => option.value === field("prompt").value));
};

// Tokens with the chosen feature's activation as colour, on one scale for all answers.
const passage = (answer, feature, maximum) => {
  const at = new Map(answer.codes.map((codes) => new Map(codes)).flatMap((codes, i) => (codes.has(feature) ? [[i, codes.get(feature)]] : [])));
  const start = Math.max(0, answer.n_prompt - LONGEST_PROMPT), places = [...at.keys()].filter((i) => i >= start);
  const gaps = places.map((i, n) => i - (n ? places[n - 1] : start));
  const levels = places.map((i) => Math.round((99 * at.get(i)) / maximum));
  const length = answer.tokens.length, body = element("div", { class: "tokens", dir: "ltr" });
  const data = { strings: answer.tokens, trajectories: [[0, 0, 0, answer.n_prompt, length, [[0, answer.tokens.map((_, i) => i)]]]] };
  writeTokens(body, data, [0, 0, start, start, length, 0, gaps, levels], maximum, true);
  return body;
};

const featureRow = ([feature, size], facts, chosen) => {
  const [name, survives] = facts[feature];
  const button = element("button", { type: "button", "aria-pressed": String(feature === chosen), "aria-label": "Colour feature " + feature }, String(feature));
  button.addEventListener("click", () => {
    field("feature").value = feature;
    recolour(button.closest("section"));
  });
  return element("tr", {}, element("th", { scope: "row" }, button),
    element("td", {}, element("a", { href: "/#feature-" + feature }, element("bdi", {}, name)), survives ? element("small", { class: "good", title: "survives all controls" }, " ✓ survives") : null),
    element("td", { class: "n" }, numberText(size)));
};

const recolour = (from = null) => {
  keepInAddress();
  const again = from && [...answersPlace.children].indexOf(from);
  show();
  if (from) answersPlace.children[again].querySelector("[aria-pressed=true]")?.focus();
};

const show = () => {
  if (!shownAnswers) return;
  const { asked, found } = shownAnswers, feature = chosenFeature();
  const values = found.answers.flatMap((answer) => answer.codes.flat()).filter(([of]) => of === feature).map(([, value]) => value);
  const maximum = Math.max(...values, 1e-9);
  const done = asked.edit === "ablate" ? "taken out" : `steered by ${String(asked.amount).replace("-", "−")}`;
  answersPlace.replaceChildren(...found.answers.map((answer) => {
    const title = answer.who + (answer.edited ? ` with feature ${asked.feature} ${done}` : "");
    const n = answer.tokens.length - answer.n_prompt;
    const active = answer.codes.slice(answer.n_prompt).filter((codes) => codes.some(([of]) => of === feature)).length;
    const told = feature === null ? "" : ` Feature ${feature} is active on ${active} of them${answer.edited && feature === asked.feature ? ", before the change" : ""}.`;
    const plain = found.answers[1].tokens, same = answer.edited && plain.length === answer.tokens.length && plain.every((token, i) => token === answer.tokens[i]);
    return element("section", { "aria-label": title }, element("h2", {}, element("bdi", {}, title)),
      passage(answer, feature, maximum),
      element("p", { class: "quiet" }, `${countText(n, "token")}${answer.ended ? "" : ", cut off there"}${same ? ", the same as without the change" : ""}.${told}`),
      same ? null : element("table", {}, element("caption", {}, "Strongest features of the answer"),
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Feature"), element("th", { scope: "col" }, "What it responds to"),
          element("th", { scope: "col", class: "n", title: "Mean over the answer's tokens, in units of the feature's typical activation" }, "× typical"))),
        element("tbody", {}, ...answer.top.map((one) => featureRow(one, found.features, feature)))));
  }));
};

const ask = async () => {
  if (busy) return;
  busy = true;
  keepInAddress();
  failedLine.textContent = "";
  stateLine.textContent = "Computing… The first question also loads the models.";
  answersPlace.setAttribute("aria-busy", "true");
  const asked = question(), began = performance.now();
  try {
    const answer = await fetch("/playground", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked) });
    if (!answer.ok) throw new Error(await answer.text());
    shownAnswers = { asked, found: await answer.json() };
    show();
    const { reference } = shownAnswers.found;
    stateLine.textContent = `Answered in ${numberText((performance.now() - began) / 1000)} seconds.${reference ? ` The reference answer is ${reference}.` : ""}`;
  } catch (error) {
    stateLine.textContent = "";
    failedLine.textContent = error instanceof TypeError ? "The server does not answer: start tsae serve again." : error.message;
  }
  answersPlace.removeAttribute("aria-busy");
  busy = false;
};

form.addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
field("problem").addEventListener("change", () => { field("prompt").value = field("problem").value; });
field("prompt").addEventListener("input", matchProblem);
field("feature").addEventListener("change", () => recolour());
if (restore()) ask();
