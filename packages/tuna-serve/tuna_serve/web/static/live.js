// Replaces the content of each element with `data-live` by what the service sends for it. The browser connects again by
// itself when the service was away; where the element asks for it (`data-reload`), the page is loaded anew at the end.
"use strict";
for (const place of document.querySelectorAll("[data-live]")) {
  const source = new EventSource(place.dataset.live);
  source.addEventListener("html", (event) => { place.innerHTML = event.data; });
  source.addEventListener("end", () => { source.close(); if (place.dataset.reload) location.reload(); });
}
