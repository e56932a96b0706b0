// The page: a tab per part of the server, chosen by the address behind #: #PART/more.
import * as asked from "./api.js";
import { el, tell } from "./kit.js";

const root = document.getElementById("root");
let parts = [], leave = null, turn = 0;

/** Words behind # as they were given to `go`: the part, then what it shows, of which all but the last may be empty. */
const place = () => location.hash.slice(1).replace(/\/+$/, "").split("/").map((word) => {
  try { return decodeURIComponent(word); } catch { return word; }  // typed by hand: a % that stands for itself
});

/** Goes to a part, and to what it shows. */
const go = (...words) => { location.hash = words.map(encodeURIComponent).join("/"); };

async function show() {
  const now = ++turn, words = place();
  const name = parts.some((part) => part.name === words[0]) ? words[0] : parts.find((part) => part.name === "train")?.name;
  for (const link of document.querySelectorAll("#tabs a"))
    link.toggleAttribute("aria-current", link.hash === `#${name}`);
  leave?.();
  leave = null;
  document.querySelector("#told.bad")?.replaceChildren();
  if (!name) return root.replaceChildren(el("p", {}, "This server has no parts."));
  document.title = `${parts.find((part) => part.name === name).title} - Fivefold`;
  const page = el("div", { class: name });
  root.replaceChildren(page);
  try {
    const part = await import(`./${name}.js`);
    const ends = await part.show(page, { ...asked, place: words.slice(1), go });
    if (now === turn) leave = ends; else ends?.();
  } catch (error) {
    if (now === turn) page.append(el("p", { class: "alarm", role: "alert" }, error.message));
  }
}

// The token has become a cookie: it need not stay in the address
if (location.search) history.replaceState(null, "", location.pathname + location.hash);
document.getElementById("told").addEventListener("click", () => tell(""));
try {
  parts = (await asked.get("parts")).parts;
  document.getElementById("tabs").append(...parts.map((part) => el("li", {}, el("a", { href: `#${part.name}` }, part.title))));
  addEventListener("hashchange", show);
  await show();
} catch (error) { tell(error.message, true); }
