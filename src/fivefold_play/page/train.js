// Train and watch: a form that starts a run, the job list, and one run as it trains.
import { button, bytes, copyable, el, field, fields, figure, keep, lines, picture, recipes, short, table, tell, time, trs } from "./kit.js";
import { curves, smoother, spans } from "./curves.js";

const KINDS = { training: "training", stopped: "stopped", complete: "complete", new: "not started yet" };
const BELOW = { tokens_per_s: "Tokens per second", mfu: "MFU", grad_norm: "Gradient norm", lr: "Learning rate",
  step_s: "Seconds of a step", peak_memory_bytes: "Peak memory" };
const SHOWN = { mfu: (v) => `${(100 * v).toPrecision(3)}%`, peak_memory_bytes: bytes };

/** What a run is doing, in words. */
export const state = ({ kind, step, steps }) => kind === "new" ? KINDS.new
  : `${KINDS[kind]}, step ${step.toLocaleString("en")}${steps ? ` of ${steps.toLocaleString("en")}` : ""}`;

export async function show(root, api) {
  const runs = el("div", { class: "choices" }), view = el("div");
  root.append(el("h1", { class: "sr" }, "Train"), runs, view);
  const given = api.place[0] === "new" ? JSON.parse(api.place[1] ?? "{}") : null; // a layout of the part Machine
  let known = null, chosen = given ? undefined : api.place[0], leave = null;
  const list = el("div", { class: "jobs" });
  const select = el("select", { "aria-label": "Run", onchange: () => api.go("train", select.value) });
  const details = el("details", { open: Boolean(given) }, el("summary", {}, "Start a run"));
  const empty = el("p", { class: "lead", hidden: true }, "Nothing has been trained here yet. Train a small model on this machine: ",
    "its loss shows in seconds, its first sentences in a minute or two.");
  runs.append(el("div", { class: "row" }, select), empty, details, list);
  starter(api, (run) => root.isConnected && api.go("train", run), given).then((form) => details.append(form)).catch((error) => tell(error.message, true));

  function choose(name) {
    leave?.();
    leave = null;
    view.replaceChildren();
    if (name) leave = watch(view, api, name);
  }

  const end = api.events("train/jobs", (found) => {
    const names = found.runs.map((run) => run.name);
    chosen ??= (found.runs.find((run) => run.kind === "training") || found.runs[0])?.name;
    if (!known && !given) details.open = !names.length && !chosen;
    empty.hidden = Boolean(names.length || chosen);
    select.parentElement.hidden = !names.length;
    const words = (run) => `${run.name}: ${run.kind === "training" ? KINDS.training : state(run)}`; // of a step it would change
    keep(select, found.runs, words, (run) => el("option", { value: run.name }, words(run)));
    if (select.value !== chosen) select.value = chosen;
    if (chosen && names.includes(chosen) && !leave) choose(chosen);
    known = found.runs;
    keep(list, [...found.started, ...found.waiting], (job) => job.id ?? `${job.run} ${job.starts}`, (job) => {
      const said = el("pre", { tabindex: 0 }), name = el("b", {}, job.run);
      if (job.id) return el("div", { class: "job" }, name, " waits ", el("code", {}, job.command), " ",
        button("Remove", () => api.post("train/remove", { id: job.id })));
      const made = el("div", { class: "job" }, name, job.starts ? " starts" : " did not start", said);
      made.set = (now) => { said.textContent = now.said || "..."; };
      return made;
    });
  });
  return () => { end(); leave?.(); };
}

/** The form. started: is called with the name of the new run. given: {recipe, layout, sets} to begin with, or null. */
async function starter(api, started, given) {
  const { recipes: words, families } = await api.get("train/recipes");
  const recipe = recipes(families, given?.recipe ?? "quickstart"), about = el("small", {});
  const layout = el("input", { name: "layout", placeholder: "as in the recipe", size: 24, spellcheck: "false", value: given?.layout });
  const set = fields(given?.sets, "train.steps=300\ndata.source=my_texts/");
  const timed = el("input", { type: "checkbox", checked: true });
  const say = () => { about.textContent = words[recipe.value] ?? ""; };
  recipe.addEventListener("change", say);
  say();
  const start = button("Train", async () => {
    const sets = lines(set);
    if (timed.checked && !sets.some((line) => line.startsWith("observe.trace_step"))) sets.push("observe.trace_step=20");
    const made = await api.post("train/start", { recipe: recipe.value, layout: layout.value.trim(), set: sets });
    tell(`${made.command}`);
    started(made.run);
  }, { class: "main" });
  return el("div", { class: "starter" }, el("div", { class: "row" }, field("Recipe", recipe), field("Layout", layout), start), about,
    field("Recipe fields, one per line", set),
    el("label", {}, timed, " measure the timeline of step 20"));
}

/** One run, as it trains. Returns a function that ends it. */
function watch(root, api, name) {
  const steps = [], columns = {}, validation = { step: [], val_loss: [] }, samples = [], alarms = [];
  let about = {}, condition = {}, planned = {}, ranks = [], restarts = [], said = "", measured = false, weight = 0.9, below = "tokens_per_s", plots = null;
  const words = el("p", { class: "lead" }), spoken = el("p", { class: "sr", role: "status" }), buttons = el("div", { class: "row", hidden: true });
  const figures = el("dl", { class: "figures" }), wrong = el("div"), failed = el("pre", { class: "alarm", tabindex: 0, hidden: true });
  const loss = el("div", { class: "plot-here" }), other = el("div", { class: "plot-here" }), time_ = el("div"), own = el("div");
  const latest = el("div"), before_ = el("div"), earlier = el("details", { hidden: true }, el("summary", {}, "Earlier samples"), before_);
  const no_text = el("p", { class: "none" }, "None yet."), no_rank = el("p", { class: "none" });
  const each_rank = table(["Rank", "Step", "Activity", "Memory"], [], "Ranks");
  const slider = el("input", { type: "range", min: 0, max: 100, value: 30, oninput: () => { weight = weigh(); draw(); } });
  const weigh = () => (slider.value > 0 ? 1 - 10 ** (-slider.value / 40) : 0);
  weight = weigh();
  const log = el("input", { type: "checkbox", onchange: () => plots[0].log(log.checked) });
  const which = el("select", { "aria-label": "Second curve", onchange: () => { below = which.value; second(); draw(true); } },
    Object.entries(BELOW).map(([value, title]) => el("option", { value }, title)));
  const section = (title, ...content) => el("section", {}, el("h2", {}, title), ...content);
  root.append(el("h2", { class: "sr" }, name), el("div", { class: "head row" }, words, buttons), spoken, wrong, failed, figures,
    el("section", {}, el("div", { class: "row" }, el("h2", {}, "Loss"), el("label", {}, "Smoothing ", slider), el("label", {}, log, " log scale"),
      spans((share) => plots.forEach((plot) => plot.last(share)))), loss, el("div", { class: "row" }, which), other),
    section("Samples", no_text, latest, earlier), section("Ranks", el("div", { class: "words" }, each_rank, no_rank)), section("A step's timeline", time_), own);

  const line = (label, color, more) => ({ label, color, ...more });
  function second() {
    plots?.[1]?.end();
    const plot = curves(other, [line(BELOW[below], "faint", { width: 1 }), line("smoothed", "first")],
      { across: "Step", height: 200, show: SHOWN[below], zero: below !== "lr" && below !== "grad_norm", sync: name });
    plots = [plots?.[0], plot];
  }
  plots = [curves(loss, [line("loss", "faint", { width: 1 }), line("smoothed", "first"), line("validation", "second", { dots: true })],
    { across: "Step", sync: name })];
  second();

  const val = [], mean = smoother(), other_mean = smoother();
  let drawn = 0, at = 0;
  function draw(again) {
    if (again) val.length = drawn = at = 0;
    while (val.length < steps.length) val.push(null);
    for (; drawn < validation.step.length && validation.step[drawn] <= steps.at(-1); drawn++) {
      while (steps[at] < validation.step[drawn]) at++; // both are in order
      if (steps[at] === validation.step[drawn]) val[at] = validation.val_loss[drawn];
    }
    plots[0].set([steps, columns.loss || [], mean(columns.loss || [], weight, again), val]);
    setTimeout(() => plots[1].set([steps, columns[below] || [], other_mean(columns[below] || [], weight, again)]));
  }

  const last = (values, count = 20) => {
    const known = (values || []).slice(-count).filter((v) => v != null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  };

  function head() {
    words.textContent = state(condition);
    const left = condition.steps ? condition.steps - condition.step : null, each = last(columns.step_s);
    const plan = (key, text) => (planned[key] == null ? "" : `planned: ${text(planned[key])}`);
    const share = (v) => (v == null ? "–" : `${(100 * v).toPrecision(3)}%`);
    const val = validation.val_loss[validation.val_loss.length - 1];
    figures.replaceChildren(
      figure("Train loss", last(columns.loss)?.toFixed(3) ?? "–", `mean of ${Math.min(20, columns.loss?.length ?? 0)} steps`, true),
      figure("Validation loss", val?.toFixed(3) ?? "–", validation.step.length ? `step ${validation.step.at(-1).toLocaleString("en")}` : ""),
      figure("Tokens/s", short(last(columns.tokens_per_s)), plan("tokens_per_s", short)),
      figure("MFU", share(last(columns.mfu)), plan("mfu", share)),
      figure("Step", time(each), plan("step_s", time)),
      figure("Left", condition.kind === "training" && left ? time(left * each) : "–", left ? `${left.toLocaleString("en")} steps` : ""),
      figure("Peak memory", bytes(columns.peak_memory_bytes?.at(-1)), plan("memory", (v) => `${bytes(v)} of tensors`)));
    const alarm = (text) => el("p", { class: "alarm", role: "alert" }, text), same = (text) => text;
    keep(wrong, [...alarms.slice(-5).map(([step, text]) => `Step ${step.toLocaleString("en")}: ${text}`),
      ...restarts.map((text) => `Restarted ${text}`)], same, alarm);
    failed.hidden = condition.kind === "training" || condition.kind === "complete" || !/error|failed/i.test(said);
    failed.textContent = said;
    each_rank.querySelector("tbody").replaceChildren(...trs(ranks.map((rank) =>
      [String(rank.rank), rank.step == null ? "–" : rank.step.toLocaleString("en"), rank.does, bytes(rank.memory)])));
    no_rank.textContent = condition.kind === "training" ? "Its ranks are on another machine." : "No rank trains now.";
    [each_rank.hidden, no_rank.hidden] = [!ranks.length, Boolean(ranks.length)];
  }

  const layout = el("input", { name: "layout", "aria-label": "Another layout", size: 12, spellcheck: "false" });
  const pause = button("Pause", async () => {
    await api.post("train/stop", { run: name });
    tell("It finishes its step, saves and ends");
  }, { title: "Finishes the step, saves and ends. Pressed again, it ends at once" });
  const resume = button("Resume", () => api.post("train/resume", { run: name }), { class: "main" });
  const change = button("Resume in this layout", async () => {
    if (!layout.value.trim()) throw Error("Write a layout, such as tp=2 or dp=2,zero=1");
    tell((await api.post("train/resume", { run: name, layout: layout.value.trim() })).command);
  }, { title: "Saves, then resumes with the same weights and data in another layout" });
  const talk = button("Talk to it", () => api.go("talk", name), { class: "main" });
  buttons.append(talk, pause, resume, layout, change,
    button("Train again", async () => {
      const { run } = await api.post("train/start", { recipe: name });
      if (root.isConnected) api.go("train", run);
    }));
  function act() {
    const focus = document.activeElement, going = condition.kind === "training", complete = condition.kind === "complete";
    [buttons.hidden, talk.hidden, pause.hidden, resume.hidden, layout.hidden, change.hidden] = [false, !complete, !going, going || complete, complete, complete];
    layout.placeholder = about.layout || "dp=2";
    if (buttons.contains(focus) && focus.hidden) buttons.querySelector("button:not([hidden])").focus();
  }

  async function timeline() {
    if (measured) {
      const found = await api.get("train/timeline", { run: name });
      return time_.firstChild.replaceChildren(picture(found.picture, "Timeline of a step"));
    }
    tell("The run saves, and resumes with the timeline of a step to come");
    await api.post("train/resume", { run: name, set: [`observe.trace_step=${condition.step + 10}`] });
  }

  async function load() {
    about = await api.get("train/about", { run: name });
    const able = measured || condition.kind !== "complete";
    keep(time_, [measured || condition.kind], String, () => el("div", {}, able
      ? button(measured ? "Show, measured and planned" : "Measure one", timeline)
      : el("p", { class: "none" }, "No step of this run was measured.")));
    keep(own, [about], JSON.stringify, () => section("The same in the terminal", copyable(about.command, "Repeat the run"),
      condition.kind === "complete" ? copyable(about.generate, "Continue a text with it") : copyable(about.resume, "Resume it"), el("details", {}, el("summary", {}, "Recipe"), copyable(about.recipe, "recipe.toml"))));
    act();
  }

  function take(found) {
    if (found.again) {
      steps.length = samples.length = alarms.length = 0;
      for (const values of [...Object.values(columns), ...Object.values(validation)]) values.length = 0;
    }
    const { validation: more = {}, samples: said = [], alarms: wrong = [] } = found; // of many steps, columns come alone
    for (const [from, into] of [[found.columns, columns], [more, validation]])
      for (const [key, values] of Object.entries(from)) {
        const all = key === "step" && into === columns ? steps : (into[key] ??= []);
        for (const value of values) all.push(value);
      }
    samples.push(...said);
    alarms.push(...wrong);
    if (said.length || found.again) {
      const shown = ([step, text]) => el("figure", { class: "sample" }, el("figcaption", {}, `Step ${step.toLocaleString("en")}`), el("pre", { tabindex: 0 }, text));
      const late = samples.slice(-20).reverse();
      keep(latest, late.slice(0, 1), JSON.stringify, shown);
      keep(before_, late.slice(1), JSON.stringify, shown);
      [no_text.hidden, earlier.hidden] = [late.length > 0, late.length < 2];
    }
    if (found.columns.step || found.columns[below]) draw(found.again);
  }

  let before = "";
  const end = api.events(["train/watch", { run: name }], (found) => {
    ({ condition = condition, planned = planned, ranks = ranks, restarts = restarts, said = said, timeline: measured = measured } = found);
    if (found.columns) take(found);
    head();
    if (condition.kind !== before) spoken.textContent = KINDS[condition.kind];
    if (condition.kind !== before || found.again || found.timeline) {  // a run that resumes may have another layout
      before = condition.kind; load().catch((error) => tell(error.message, true)); }
  });
  return () => { end(); plots.forEach((plot) => plot.end()); };
}
