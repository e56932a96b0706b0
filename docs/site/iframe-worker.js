// Browsers start no worker from a file:// page. The search's worker then runs in a frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html><title>search</title>";
      this.frame = frame;
      this.inner = new Promise((ready) => {
        frame.onload = () => {
          const inner = frame.contentWindow;
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          inner.importScripts = (...urls) => Promise.all(urls.map((other) => load(inner, other)));
          load(inner, url).then(() => ready(inner));
        };
      });
      document.body.append(frame);
    }
    postMessage(data) {
      this.inner.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };

function load(inner, url) {
  const script = inner.document.createElement("script");
  script.src = url;
  const done = new Promise((ready) => (script.onload = ready));
  inner.document.body.append(script);
  return done;
}
