// Text: what a source holds, a sample of it, the time that training on it takes, and files that are dropped.
import { button, el, field, figure, short, tell, time, wrong } from "./kit.js";

const KINDS = ".txt,.md,.jsonl,.parquet,.csv";

export async function show(root, api) {
  const source = el("input", { value: api.place[0] ?? "stdlib", size: 36, spellcheck: "false" }), view = el("div");
  const look = button("Look", () => api.go("text", source.value.trim()), { class: "main" });
  const files = el("input", { type: "file", multiple: true, accept: KINDS, onchange: () => send(files.files) });
  const drop = el("div", { class: "drop" }, "Drop files here (txt, md, jsonl, parquet, csv), or ", el("label", {}, "choose them ", files));
  root.append(el("h1", {}, "Text"), el("div", { class: "row" }, field("Source: stdlib, talk, or a file or folder in the page's folders", source), look), drop, view);
  for (const kind of ["dragover", "dragleave", "drop"]) drop.addEventListener(kind, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", kind === "dragover");
    if (kind === "drop") send(event.dataTransfer.files);
  });

  let mended = null;
  async function send(list) {
    let made = { folder: "" };
    mended?.();
    try {
      for (const [i, file] of [...list].entries()) {
        tell(`Sends ${i + 1} of ${list.length}...`);
        made = await api.post(`text/upload?${new URLSearchParams({ name: file.name, folder: made.folder })}`, file);
      }
      if (made.source && root.isConnected) api.go("text", made.source);
    } catch (error) { mended = wrong(error, files); }
  }

  view.replaceChildren(el("p", { class: "none" }, "Reads and counts..."));
  try {
    const found = await api.get("text/about", { source: source.value });
    view.replaceChildren(el("dl", { class: "figures" }, figure("Files", short(found.files), ""), figure("Documents", short(found.documents), ""),
      figure("Tokens", short(found.tokens), "training and validation"), figure("One pass here", time(found.seconds), found.why)),
    button("Train on this", () => api.go("train", "new", JSON.stringify({ recipe: "quickstart", sets: found.set, layout: "" })), { class: "main" }),
    el("ul", { class: "facts" }, found.facts.map((line) => el("li", {}, line))),
    el("section", {}, el("h2", {}, "Samples"), found.samples.map(([name, text]) =>
      el("figure", { class: "sample" }, el("figcaption", {}, name), el("pre", { tabindex: 0 }, text)))));
  } catch (error) { view.replaceChildren(el("p", { class: "alarm", role: "alert" }, error.message)); }
}
