// Asks the server. Everything throws an Error with a sentence for people.
import { tell } from "./kit.js";

const SILENT = "The server does not answer. Is `fivefold play` still running?";

async function answer(request) {
  let response;
  try { response = await request; } catch { throw Error(SILENT); }
  const text = await response.text();
  let content;
  try { content = JSON.parse(text); } catch { throw Error(text.slice(0, 300) || `The server answers ${response.status}`); }
  if (!response.ok) throw Object.assign(Error(content.error || `The server answers ${response.status}`), { key: content.key });
  return content;
}

const address = (path, params = {}) => {
  const query = new URLSearchParams(params).toString();
  return `/api/${path}${query ? `?${query}` : ""}`;
};

export const get = (path, params) => answer(fetch(address(path, params)));

export const post = (path, body = {}) =>
  answer(fetch(address(path), { method: "POST", body: body instanceof Blob ? body : JSON.stringify(body) }));

/** Calls onMessage(value) for each event, and tells of errors. path may be [path, params]. Returns a function that ends it.
 * A server that does not answer is told of once; the browser asks again by itself. A browser has six connections to a
 * server, so a hidden page leaves its stream and asks anew when it is seen again. own: the stream
 * stays open while the page is hidden, and onMessage gets errors, too. */
export function events(path, onMessage, own = false) {
  let source = null, told = false;
  const close = () => { source?.close(); source = null; };
  function open() {
    source = new EventSource(address(...[path].flat()));
    source.onopen = () => { if (told) tell(""); told = false; };
    source.onerror = () => { if (!told) tell(SILENT, true); told = true; };
    source.onmessage = (event) => {
      const found = JSON.parse(event.data);
      if (found.error && !own) tell(found.error, true); else onMessage(found);
    };
    source.addEventListener("end", end);
  }
  const turn = () => { if (document.hidden && !own) close(); else if (!source) open(); };
  function end() {
    close();
    document.removeEventListener("visibilitychange", turn);
  }
  document.addEventListener("visibilitychange", turn);
  turn();
  return end;
}
