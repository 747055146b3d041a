"use strict";
// Reads numbers off the charts under the pointer, or with the arrow keys, and plays the videos of a strip together. The page is complete
// without it.
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

function playTogether(strip) {
  const videos = [...strip.querySelectorAll("video")];
  if (!videos.length) return;
  const button = Object.assign(document.createElement("button"), { textContent: "Play" });
  const update = () => (button.textContent = videos.every((video) => video.paused) ? "Play" : "Pause");
  const toggle = (video, play) => (play ? video.play() : video.pause());
  for (const video of videos) {
    video.controls = false; // they would cover a small video; a click and the button replace them
    video.addEventListener("click", () => toggle(video, video.paused));
    video.addEventListener("play", update);
    video.addEventListener("pause", update);
  }
  button.addEventListener("click", () => {
    const play = videos.every((video) => video.paused);
    for (const video of videos) {
      if (play) video.currentTime = 0; // together, so that they can be compared
      toggle(video, play);
    }
  });
  strip.querySelector("figcaption").append(button);
}

document.querySelectorAll("svg[data-name]").forEach(watch);
document.querySelectorAll(".strips > figure").forEach(playTogether);
document.documentElement.dataset.script = "ran";
