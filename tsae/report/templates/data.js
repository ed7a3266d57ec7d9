// Unpacking data, and building elements. Text of files reaches the page as text nodes only.
const DOT = "·";
const unpacked = new Map();

// Packed parts are base64 of deflated text; each is unpacked once, when it is first asked for.
const unpack = (name) => {
  if (!unpacked.has(name)) unpacked.set(name, inflate("part-" + name).then(JSON.parse));
  return unpacked.get(name);
};
const inflate = async (id) => {
  const binary = atob(document.getElementById(id).textContent);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
};

// element("p", { class: "quiet" }, "text", child, …): strings become text nodes, null is left out.
const element = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
const fill = (made, attributes, children) => {
  for (const [key, value] of Object.entries(attributes)) if (value != null) made.setAttribute(key, value);
  made.append(...children.flat().filter((child) => child != null));
  return made;
};

// As tsae.report.text writes them: about three significant digits and a true minus.
const decimals = (size) =>
  size < 0.00005 ? 2 : size >= 100 ? 0 : size >= 3 ? 1 : size >= 0.095 ? 2 : size >= 0.0095 ? 3 : 4;
const numberText = (value, sign = false, like = value) => {
  if (value == null) return "–";
  const text = Math.abs(value).toFixed(decimals(Math.abs(like)));
  return (value < 0 ? "−" : sign ? "+" : "") + text;
};
const intervalText = (low, high, like) => `[${numberText(low, true, like)}, ${numberText(high, true, like)}]`;
const qText = (q) => (q == null ? "–" : q < 0.001 ? "< 0.001" : q.toFixed(q < 0.1 ? 3 : 2));
const percentText = (share) => {
  const value = 100 * share;
  return (value > 0 && value < 1) || (value > 99 && value < 100) ? value.toFixed(1) : value.toFixed(0);
};
const countText = (n, noun) => `${n.toLocaleString("en-US")} ${noun}${n === 1 ? "" : "s"}`;
