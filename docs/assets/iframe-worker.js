// Browsers start no Worker from a page that is opened as a file. This runs the worker's script in a hidden frame, with the
// part of Worker's interface that the search uses, so that search works without a server.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.document.open();
      inner.document.write(
        "<!doctype html><script>postMessage = parent.postMessage.bind(parent)</script><script src=\"" + url + "\"></script>"
      );
      inner.document.close();
      this.ready = new Promise((done) => { inner.onload = done; });
      window.addEventListener("message", (event) => {
        if (event.source === inner) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() { this.frame.remove(); }
  };
}
