// A page opened as a file may not start workers: the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.document.open();
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = (...sources) =>
        sources.reduce((before, src) => before.then(() => this.load(src)), Promise.resolve());
      this.ready = new Promise((done) => frame.addEventListener("load", done));
      inner.document.write(`<body><script src="${url}"></script>`);
      inner.document.close();
      this.inner = inner;
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    load(src) {
      const script = this.inner.document.createElement("script");
      this.inner.document.body.append(script);
      return new Promise((onload) => Object.assign(script, { src, onload }));
    }
    terminate() {}
  };
}
