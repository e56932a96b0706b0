// Talk: a run's model continues a text or answers, token by token. Each token shows how likely it was.
import { button, el, field } from "./kit.js";

const percent = (p) => `${+(100 * p).toPrecision(p < 0.1 ? 2 : 3)}%`;
const TEXTS = {
  base: { say: "Text to continue", send: "Continue", hint: "def main(" },
  chat: { say: "Message", send: "Send", hint: "Ask something" },
};

export async function show(root, api) {
  const { runs } = await api.get("talk/runs");
  if (!runs.length) return root.append(el("h1", {}, "Talk"), el("p", { class: "lead" }, "No run has made a step yet. ", el("a", { href: "#train" }, "Train one")));
  let about = null, messages = [], leave = () => {};
  const run = el("select", { onchange: () => { step.replaceChildren(); restart(); } },
    runs.map(({ name }) => el("option", { value: name, selected: name === api.place[0] }, `${name}`)));
  const step = el("select", { onchange: () => restart() });
  const number = (value, more) => el("input", { type: "number", value, required: true, ...more });
  const temperature = number(0.8, { name: "temperature", min: 0, max: 5, step: 0.1 }), most = number(200, { name: "max_tokens", min: 1, max: 10000 }), seed = number(0, { name: "seed", min: 0 });
  const system = el("input", { placeholder: "Answer in one sentence." }), systemField = field("System message", system);
  const talk = button("Train one that answers", () => api.go("train", "new", JSON.stringify({ recipe: "talk", sets: "", layout: "" })));
  const note = el("p", { class: "lead" }), said = el("div", { class: "said", tabindex: 0, role: "log", "aria-label": "Text" });
  const words = el("textarea", { rows: 2, onkeydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey && about?.chat) { event.preventDefault(); send.click(); }
  } });
  const sayField = field("", words), detail = el("div", { class: "detail", role: "status" });
  const send = button("Loading", () => (about.chat ? chat() : say(words.value)), { class: "main", disabled: true });
  const more = button("Go on", () => say(said.textContent), { disabled: true });
  const stop = el("button", { type: "button", disabled: true, onclick: () => leave() }, "Stop");
  root.append(el("h1", {}, "Talk"), el("div", { class: "row" }, field("Run", run), field("Checkpoint", step), field("Temperature", temperature),
    field("Tokens", most), field("Seed", seed)), note, said, detail, el("div", { class: "composer" }, systemField, sayField,
    el("div", { class: "row" }, send, more, stop, button("Clear", () => clear()))));

  /** Asks, and writes the answer into a place. Returns when it ends, or is left. */
  function ask(given, place) {
    leave();
    return new Promise((done, fail) => {
      let end = () => {}, left = false;
      const finish = (error) => { left = true; end(); stop.disabled = true; error ? fail(error) : done(); };
      leave = () => left || finish();
      stop.disabled = given.text == null;
      api.post("talk/ask", { run: run.value, step: step.value ? Number(step.value) : null, temperature: Number(temperature.value),
        max_tokens: Number(most.value), seed: Number(seed.value), system: system.value, ...given }).then(({ id }) => {
        if (left) return;
        end = api.events(["talk/answer", { id }], (line) => {
          if (line.about) learn(line.about);
          else if (line.tokens) write(place, line);
          else if (line.end === "another") finish(Error("Another page has asked something"));
          else finish(line.error && Error(line.error));
        }, true);
      }).catch(finish);
    });
  }

  function write(place, { text, tokens }) {
    if (!tokens.length) return place.append(text);
    const piece = el("span", { class: "token" }, text);
    piece.tokens = tokens;
    piece.style.setProperty("--p", Math.min(...tokens.map((token) => token.p)));
    place.append(piece);
    said.scrollTop = said.scrollHeight;
  }

  /** Shows the tokens of a piece of text: how likely each was, beside the likeliest. */
  function look(piece) {
    if (!piece || piece.classList.contains("on")) return;
    said.querySelector(".on")?.classList.remove("on");
    piece.classList.add("on");
    detail.replaceChildren(...piece.tokens.map(({ token, p, others }) => el("div", {}, el("b", {}, JSON.stringify(token)), ` ${percent(p)}`,
      el("ul", {}, others.map(([other, of]) => el("li", {}, el("meter", { value: of, "aria-hidden": "true" }), ` ${percent(of)} `, el("code", {}, JSON.stringify(other))))))));
  }
  said.addEventListener("mouseover", (event) => look(event.target.closest(".token")));
  said.addEventListener("click", (event) => look(event.target.closest(".token")));
  said.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key], all = [...said.querySelectorAll(".token")];
    if (!by || !all.length) return;
    event.preventDefault();
    const at = all.findIndex((piece) => piece.classList.contains("on"));
    look(all[Math.max(0, Math.min(all.length - 1, at + by))]);
  });

  function learn(found) {
    about = found;
    step.replaceChildren(el("option", { value: "" }, `latest, ${found.steps.at(-1)?.toLocaleString("en")}`),
      ...[...found.steps].reverse().map((one) => el("option", { value: one, selected: step.value === String(one) }, one.toLocaleString("en"))));
    const texts = TEXTS[found.chat ? "chat" : "base"];
    note.replaceChildren(...(found.chat ? [`It answers messages. It sees the last ${found.context.toLocaleString("en")} tokens.`]
      : ["This is a base model. It continues your text. ", talk]));
    systemField.hidden = !found.chat;
    more.hidden = found.chat;
    sayField.firstChild.textContent = texts.say;
    send.textContent = texts.send;
    words.placeholder = texts.hint;
  }

  async function say(text, given = {}) {
    const tag = about.chat ? "div" : "span", asked = el(tag, { class: "given" }, text), place = el(tag);
    if (!about.chat) said.replaceChildren();
    said.append(asked, place);
    more.disabled = true;
    try {
      await ask({ text, ...given }, place);
      more.disabled = false;
    } catch (error) {
      if (!place.textContent) { asked.remove(); place.remove(); }
      throw error;
    }
    return place.textContent;
  }

  async function chat() {
    const text = words.value;
    if (!text.trim()) return;
    words.value = ""; // the next message may be written meanwhile
    try {
      messages.push({ role: "user", content: text }, { role: "assistant", content: await say(text, { messages }) });
    } catch (error) {
      words.value ||= text;
      throw error;
    }
  }

  function clear() {
    leave();
    messages = [];
    more.disabled = true;
    said.replaceChildren();
    detail.replaceChildren("Point at a piece of the text, or go through it with the arrow keys, to see how likely its tokens were.");
  }

  async function restart() {
    clear();
    about = null;
    send.disabled = true;
    send.textContent = "Loading";
    note.textContent = "Loading the model...";
    try { await ask({}, null); } catch (error) { note.textContent = error.message; send.textContent = "Send"; }
    send.disabled = !about;
  }
  restart();
  return () => leave();
}
