// Shows a sample of a sheet larger, and goes to its neighbours with the arrow keys: in its row, or at the same column of another row.
const rows = [...document.querySelectorAll(".sheet .tiles")].map((tiles) => [...tiles.children]);
const dialog = document.body.appendChild(document.createElement("dialog"));
let row = 0;
let column = 0;

const target = (tile) => tile.querySelector("video") ?? tile.querySelector("a") ?? tile;
for (const tile of rows.flat()) target(tile).tabIndex = 0;

function go(down, right) {
  row = Math.min(Math.max(row + down, 0), rows.length - 1);
  column = Math.min(Math.max(column + right, 0), rows[row].length - 1);
  const tile = rows[row][column];
  if (!dialog.open) return target(tile).focus();
  const media = tile.querySelector("img, video")?.cloneNode();
  const heading = tile.closest(".strips > figure").querySelector("figcaption strong").textContent;
  const label = Object.assign(document.createElement("p"), { textContent: `${tile.querySelector("figcaption").innerText}: ${heading}`, dir: "auto" });
  // A video goes on at the moment that its neighbour was at, so that the two can be compared.
  const before = dialog.querySelector("video");
  if (media?.play) {
    Object.assign(media, { controls: true, autoplay: !still.matches });
    if (before) media.currentTime = before.currentTime;
  }
  dialog.replaceChildren(media ?? "", label);
}

function find(element) {
  const wanted = element.closest?.(".sheet .tile");
  const at = rows.findIndex((tiles) => tiles.includes(wanted));
  if (at >= 0) [row, column] = [at, rows[at].indexOf(wanted)];
  return at >= 0;
}

function enlarge(event) {
  if (dialog.open || !find(event.target) || (event.type === "click" && !event.target.matches("img"))) return;
  event.preventDefault();
  dialog.showModal();
  go(0, 0);
}

document.addEventListener("click", enlarge);
document.addEventListener("dblclick", enlarge);
dialog.addEventListener("click", () => dialog.close());
dialog.addEventListener("close", () => target(rows[row][column]).focus());
document.addEventListener("keydown", (event) => {
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  if (event.key === "Enter") enlarge(event);
  else if (event.key in moves && (dialog.open || find(event.target))) {
    event.preventDefault();
    go(...moves[event.key]);
  }
});
document.documentElement.dataset.script = "ran";
