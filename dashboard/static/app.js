"use strict";
// Keeps the page up to date: the server sends the content again when it changes, and only what differs is replaced, so
// that focus, selection and open menus stay.  Without this script, everything works except that nothing moves.

const main = document.querySelector("[data-live]");
const status = document.getElementById("live");
const SEARCH_DELAY_MS = 150;
let source = null;
let shown = "";

function show(text, kind) {
  status.textContent = text;
  status.className = `live ${kind}`;
}

function follow() {
  if (source) source.close();
  source = new EventSource(main.dataset.live + window.location.search);
  source.onmessage = (event) => {
    show("live", "on");
    if (event.data === shown) return;
    shown = event.data;
    const next = document.createElement("main");
    next.innerHTML = JSON.parse(event.data);
    morph(main, next);
  };
  source.addEventListener("end", () => { source.close(); window.location.reload(); });
  source.onerror = () => {
    show("not connected", "off");
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, 3000);
  };
}

// Makes the children of `old` equal to those of `next`.  Elements with an id keep their identity.
function morph(old, next) {
  const byId = new Map();
  for (const child of old.children) if (child.id) byId.set(child.id, child);
  let place = old.firstChild;
  const all = [...next.childNodes];
  for (const [index, wanted] of all.entries()) {
    let found = wanted.id ? byId.get(wanted.id) : null;
    if (!found && place && !wanted.id) {
      // Something may have been removed here, unless something was added.
      const follows = all[index + 1];
      if (!alike(place, wanted) && place.nextSibling && alike(place.nextSibling, wanted)
          && !(follows && alike(place, follows))) {
        const gone = place;
        place = place.nextSibling;
        gone.remove();
      }
      if (alike(place, wanted)) found = place;
    }
    if (found) {
      byId.delete(wanted.id);
      if (found === place) place = place.nextSibling;
      else old.insertBefore(found, place);
      update(found, wanted);
    } else {
      old.insertBefore(wanted, place);
    }
  }
  while (place) {
    const after = place.nextSibling;
    place.remove();
    place = after;
  }
}

function alike(one, other) {
  return one.nodeType === other.nodeType && one.nodeName === other.nodeName && (one.id || "") === (other.id || "");
}

function update(old, next) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  if (old.isEqualNode(next) || "keep" in old.dataset) return;
  for (const { name } of [...old.attributes]) {
    // What the visitor has opened stays open.
    if (!next.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  morph(old, next);
}

let delay = null;
document.addEventListener("input", (event) => {
  if (event.target.id !== "search") return;
  clearTimeout(delay);
  delay = setTimeout(() => {
    const url = new URL(window.location.href);
    url.searchParams.delete("page");
    if (event.target.value) url.searchParams.set("q", event.target.value);
    else url.searchParams.delete("q");
    window.history.replaceState(null, "", url);
    follow();
  }, SEARCH_DELAY_MS);
});

let prefix = 0;
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const search = document.getElementById("search");
  if (event.key === "/" && search) {
    event.preventDefault();
    search.focus();
    search.select();
  } else if (event.key === "g") {
    prefix = event.timeStamp;
  } else if (event.timeStamp - prefix < 1500) {
    prefix = 0;
    const entry = [...document.querySelectorAll("nav a[data-key]")].find((each) => each.dataset.key === event.key);
    if (entry) entry.click();
  }
});

window.addEventListener("pagehide", () => source && source.close());
window.addEventListener("pageshow", (event) => event.persisted && follow());
follow();
