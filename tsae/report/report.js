// Draws the figures from the page's JSON, in the page's colours and width, and again when either changes.
(() => {
  const specs = JSON.parse(document.getElementById("figures").textContent);
  const narrow = window.matchMedia("(max-width: 760px)");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const config = { responsive: true, displaylogo: false, displayModeBar: false };

  const themed = (layout) => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const copy = JSON.parse(JSON.stringify(layout));
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

  const draw = () => {
    for (const element of document.querySelectorAll(".plot")) {
      const name = narrow.matches && element.dataset.narrow ? element.dataset.narrow : element.dataset.figure;
      const spec = specs[name];
      element.style.minHeight = spec.layout.height + "px";
      Plotly.react(element, spec.data, themed(spec.layout), config);
    }
  };
  draw();
  narrow.addEventListener("change", draw);
  dark.addEventListener("change", draw);

  // A feature's number leads to its card where it has one.
  for (const element of document.querySelectorAll(".feature")) {
    const id = "feature-" + element.dataset.feature;
    if (document.getElementById(id)) {
      const link = document.createElement("a");
      link.href = "#" + id;
      link.textContent = element.textContent;
      element.replaceChildren(link);
    }
  }
})();
