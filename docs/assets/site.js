// Reports follow the colors of the page around them.
"use strict";
const theme = () => (document.body.dataset.mdColorScheme === "slate" ? "dark" : "light");
const tell = () => document.querySelectorAll("iframe.report").forEach((frame) => frame.contentWindow.postMessage({ theme: theme() }, "*"));
document.querySelectorAll("iframe.report").forEach((frame) => frame.addEventListener("load", tell));
new MutationObserver(tell).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
tell();
