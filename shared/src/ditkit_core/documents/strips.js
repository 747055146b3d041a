"use strict";
// Plays the videos of a strip together, and reloads a page that is written again. The page is complete without it.
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

document.querySelectorAll(".strips > figure").forEach(playTogether);
const { reload, written } = document.querySelector("header").dataset;
if (reload) reloadAfter(Number(reload), Number(written));
