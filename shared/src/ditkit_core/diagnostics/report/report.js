"use strict";
// Reads numbers off the charts under the pointer, or with the arrow keys, plays the videos of a strip together, and reloads the page while
// its run trains. The page is complete without it.
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

// What a reload must not lose; a browser that stores nothing for a file only forgets it.
const store = {
  get: (name) => { try { return sessionStorage.getItem(location.pathname + name); } catch { return null; } },
  set: (name, value) => { try { sessionStorage.setItem(location.pathname + name, value); } catch { /* forgotten */ } },
};
const still = matchMedia("(prefers-reduced-motion: reduce)");

function playTogether(strip, index) {
  const videos = [...strip.querySelectorAll("video")];
  if (!videos.length) return;
  const button = Object.assign(document.createElement("button"), { textContent: "Play" });
  const update = () => (button.textContent = videos.every((video) => video.paused) ? "Play" : "Pause");
  // A browser may refuse to play; the button then still says Play.
  const toggle = (video, play) => (play ? video.play().catch(() => {}) : video.pause());
  let isSeen = false;
  // By the reader's last word, else by the setting of the system; only where it is seen, because many videos take much of a processor.
  const wanted = () => (store.get(`play${index}`) ?? String(!still.matches)) === "true";
  const follow = () => {
    const play = isSeen && wanted();
    if (play && videos.every((video) => video.paused)) videos.forEach((video) => (video.currentTime = 0));
    videos.forEach((video) => toggle(video, play));
  };
  for (const video of videos) {
    video.controls = false; // they would cover a small video; a click and the button replace them
    video.addEventListener("click", () => toggle(video, video.paused));
    video.addEventListener("play", update);
    video.addEventListener("pause", update);
  }
  button.addEventListener("click", () => {
    const play = videos.every((video) => video.paused);
    store.set(`play${index}`, play);
    for (const video of videos) {
      if (play) video.currentTime = 0; // together, so that they can be compared
      toggle(video, play);
    }
  });
  still.addEventListener("change", follow);
  new IntersectionObserver((entries) => {
    isSeen = entries[entries.length - 1].isIntersecting;
    follow();
  }).observe(strip);
  strip.querySelector("figcaption").append(button);
}

function keepOpen(details, index) {
  const name = `open${index}`;
  if (store.get(name) !== null) details.open = store.get(name) === "true";
  details.addEventListener("toggle", () => store.set(name, details.open));
}

// The page cannot ask whether there is a newer one: its policy forbids to load anything. An old page is reloaded less often.
function reloadAfter(seconds, written) {
  const age = Math.max(0, Date.now() / 1000 - written);
  let touched = 0;
  for (const name of ["pointerdown", "pointermove", "keydown", "wheel", "touchmove"]) {
    addEventListener(name, () => (touched = Date.now()), { passive: true });
  }
  const attempt = () => {
    const isRead = Date.now() - touched < 5000 || document.querySelector("svg:focus");
    if (document.hidden || isRead || document.fullscreenElement) setTimeout(attempt, 1000);
    else location.reload();
  };
  setTimeout(attempt, 1000 * Math.min(Math.max(seconds, age / 10), 600));
}

document.querySelectorAll("svg[data-name]").forEach(watch);
document.querySelectorAll(".strips > figure").forEach(playTogether);
document.querySelectorAll("details").forEach(keepOpen);
const { reload, written } = document.querySelector("header").dataset;
if (reload) reloadAfter(Number(reload), Number(written));
document.documentElement.dataset.script = "ran";
