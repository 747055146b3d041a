// Reads numbers off the charts under the pointer, or with the arrow keys. The page is complete without it.
const sections = JSON.parse(document.getElementById("numbers").textContent).sections;

function watch(svg) {
  const { steps, values } = sections[svg.dataset.section].series[svg.dataset.name];
  const [first, last, left, right, unit] = ["first", "last", "left", "right", "unit"].map((name) => Number(svg.dataset[name]));
  const output = svg.parentElement.querySelector("output");
  const cursor = svg.querySelector(".cursor");
  let place = steps.length - 1;

  function show(wanted) {
    place = Math.min(Math.max(wanted, 0), steps.length - 1);
    const x = left + ((steps[place] - first) / (last - first)) * (right - left);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    const value = values[place] / unit;
    const shown = Object.assign(document.createElement("data"), { value, textContent: Number(value.toPrecision(3)) });
    output.replaceChildren(`step ${steps[place]}: `, shown);
  }

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const step = first + ((x - left) / (right - left)) * (last - first);
    let nearest = 0;
    steps.forEach((each, i) => {
      if (Math.abs(each - step) < Math.abs(steps[nearest] - step)) nearest = i;
    });
    show(nearest);
  });
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: steps.length - 1 };
    if (event.key in moves) {
      event.preventDefault();
      show(moves[event.key]);
    }
  });
}

function keepOpen(details, index) {
  const name = `open${index}`;
  if (store.get(name) !== null) details.open = store.get(name) === "true";
  details.addEventListener("toggle", () => store.set(name, details.open));
}

document.querySelectorAll("svg[data-name]").forEach(watch);
document.querySelectorAll("details").forEach(keepOpen);
document.documentElement.dataset.script = "ran";
