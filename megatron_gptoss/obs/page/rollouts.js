"use strict";
// Draws the blocks of data that stand before this script. A block is read when its step is first looked at; what is on the page at any
// time is one list of groups and one rollout. Text is only ever set as text, never as markup.

const $ = id => document.getElementById(id);
const read = key => JSON.parse($("data-" + key).textContent);
const run = read("run"), pieces = read("pieces"), blocks = new Map();
const block = key => blocks.get(key) ?? blocks.set(key, read(key)).get(key);
const summary = key => run.steps.find(step => step.key === key);

const MEASURES = { advantage: "advantage", mismatch: "mismatch", logp: "log-prob", version: "policy version", none: "none" };
const FIELD = { advantage: "adv", mismatch: "mm", logp: "lp", version: "v" };
const ROLE_NAME = { system: "System", developer: "Developer", user: "User", assistant: "Assistant", "?": "Unfinished" };
const any = { reward: "", label: "", stop: "", text: "", order: "" };
const state = { key: "", group: 0, index: 0, by: "advantage", filter: { ...any } };

// ---- small tools

function el(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (name === "style") for (const [rule, text] of Object.entries(value)) made.style.setProperty(rule, text);
    else if (name.startsWith("aria-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter(child => child !== null && child !== undefined && child !== ""));
  return made;
}
const number = (x, digits = 3) =>
  typeof x !== "number" ? (x ?? "–") : x !== 0 && Math.abs(x) < 0.001 ? x.toExponential(1).replace("e-", "e−").replace(/^-/, "−")
    : String(Number(x.toPrecision(digits))).replace("-", "−");
const signed = x => (typeof x === "number" && x > 0 ? "+" : "") + number(x);
const of = (list, i) => (Array.isArray(list) ? list[i] : list);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const real = list => (Array.isArray(list) ? list : [list]).filter(x => typeof x === "number");
const finite = x => (typeof x === "number" ? x : 0); // "nan" and "inf" are text in the data
const bytes = text => JSON.stringify(text).slice(1, -1);

// ---- colours: the scale is that of shades.py

function strength(value, limit) {
  if (value === "nan" || value === "inf") return 1;
  if (value === "-inf") return -1;
  if (typeof value !== "number" || !(limit > 0) || value === 0) return 0;
  return Math.sign(value) * Math.sqrt(Math.min(Math.abs(value) / limit, 1));
}
const mix = (hue, share) => `rgb(${hue.join(" ")} / calc(${share.toFixed(3)} * var(--depth)))`;
function ground(value) {
  if (state.by === "none") return "";
  if (state.by === "version") return typeof value === "number" ? mix(run.versions[value % run.versions.length], 0.6) : "";
  const power = strength(value, summary(state.key).limits[state.by]);
  return Math.abs(power) < 0.02 ? "" : mix(run.hues[state.by][power > 0 ? 1 : 0], Math.abs(power));
}

// ---- what is chosen

function matching(group) {
  const { reward, label, stop, text } = state.filter;
  const rewards = group.rollouts.map(r => r.reward), differ = rewards.some(r => r !== rewards[0]);
  return group.rollouts.filter(r =>
    (reward === "" || (reward === ">0" && r.reward > 0) || (reward === "<=0" && r.reward <= 0) || (reward === "differ" && differ)
      || String(r.reward) === reward)
    && (label === "" || r.labels.includes(label)) && (stop === "" || r.stop === stop)
    && (text === "" || group.prompt.includes(text) || group.id.includes(text) || textOf(r).includes(text)));
}
const textOf = r => (r.text ??= r.t.map(n => pieces[n][1]).join(""));
const extremes = list => list.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]); // of any length
const largest = group => group.rollouts.reduce((most, r) => Math.max(most, ...extremes(real(r.mm).map(Math.abs)).slice(1)), 0);
const meanReward = group => group.rollouts.reduce((sum, r) => sum + finite(r.reward), 0) / group.rollouts.length;

function groupsShown() {
  const shown = block(state.key).groups.map(group => ({ group, rollouts: matching(group) })).filter(each => each.rollouts.length);
  if (state.filter.order === "mismatch") shown.sort((a, b) => largest(b.group) - largest(a.group));
  if (state.filter.order === "reward") shown.sort((a, b) => meanReward(a.group) - meanReward(b.group));
  return shown;
}
function chosen() {
  const group = block(state.key).groups.find(g => g.g === state.group);
  return { group, rollout: group?.rollouts.find(r => r.i === state.index) };
}
function go(changes) {
  Object.assign(state, changes);
  if ("key" in changes && !("group" in changes)) first();
  const hash = `#${state.key}/${state.group}/${state.index}/${state.by}`;
  if (location.hash !== hash) history.replaceState(null, "", hash);
  draw();
}
function first() {
  const found = groupsShown()[0];
  [state.group, state.index] = found ? [found.group.g, found.rollouts[0].i] : [-1, -1];
}
function fromHash() {
  const [key, group, index, by] = decodeURIComponent(location.hash.slice(1)).split("/");
  if (Object.hasOwn(MEASURES, by)) state.by = by;
  state.key = summary(key) ? key : (run.steps.filter(s => !s.heldOut).at(-1) ?? run.steps.at(-1)).key;
  [state.group, state.index] = [Number(group), Number(index)];
  if (key !== state.key || !chosen().rollout) first();
}
function move(by) {
  const all = groupsShown().flatMap(each => each.rollouts.map(r => [each.group.g, r.i]));
  const at = all.findIndex(([g, i]) => g === state.group && i === state.index);
  const next = all[at < 0 ? 0 : at + by];
  if (next) go({ group: next[0], index: next[1] });
}
function same(key, prompt, index) { // the rollout of a prompt in another step, or the first where there are fewer
  const { g, rollouts } = block(key).groups.find(group => group.id === prompt);
  go({ key, group: g, index: (rollouts.find(r => r.i === index) ?? rollouts[0]).i });
}
function moveStep(by) {
  const kind = run.steps.filter(s => s.heldOut === summary(state.key).heldOut);
  const next = kind[kind.findIndex(s => s.key === state.key) + by];
  if (next) go({ key: next.key });
}

// ---- drawing

function draw() { drawTop(); drawChart(); drawFilters(); drawGroups(); drawRollout(); }

const plainButton = (textContent, title, onclick, disabled = false) =>
  el("button", { className: "plain", textContent, title, onclick, disabled });

function drawTop() {
  const here = summary(state.key), facts = [], sum = (steps, field) => steps.reduce((n, s) => n + s[field], 0);
  for (const [heldOut, word] of [[false, "training step"], [true, "held-out evaluation"]]) {
    const steps = run.steps.filter(s => s.heldOut === heldOut);
    if (steps.length) facts.push(`${plural(steps.length, word)}, ${plural(sum(steps, "rollouts"), "rollout")}`);
  }
  if (run.steps.some(s => s.shown < s.rollouts)) facts.push(`${sum(run.steps, "shown")} rollouts are on this page`);
  const segments = Object.entries(MEASURES).map(([by, words]) => {
    const unknown = !here.scored && (by === "advantage" || by === "mismatch");
    return el("button", {
      textContent: words, "aria-pressed": state.by === by, onclick: () => go({ by }), disabled: unknown,
      title: unknown ? "Only known of steps that were trained with run.archive_scores" : "",
    });
  });
  const bare = document.body.classList.contains("bare"), other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  $("top").replaceChildren(
    el("h1", { textContent: run.name }), el("span", { className: "facts", textContent: facts.join(" · ") }),
    el("div", { className: "segments", "aria-label": "Colour of tokens" }, ...segments),
    plainButton(bare ? "show Harmony tokens" : "hide Harmony tokens", "", () => { document.body.classList.toggle("bare"); drawTop(); }),
    plainButton(other, "", () => { theme(other); drawTop(); }));
}

function drawChart() {
  const trained = run.steps.filter(s => !s.heldOut), held = run.steps.filter(s => s.heldOut), lines = [];
  const means = trained.map(s => finite(s.mean)), low = Math.min(0, ...means), most = Math.max(1e-9, ...means);
  const high = low === 0 && most <= 1 ? 1 : most;
  if (trained.length) {
    lines.push(el("div", { className: "line" },
      el("span", { className: "what", textContent: `mean reward by step, ${number(low)} to ${number(high)}` }),
      el("div", { className: "bars" }, ...trained.map(s => el("button", {
        title: `step ${s.step}: mean reward ${number(s.mean)}, ${plural(s.rollouts, "rollout")}`, onclick: () => go({ key: s.key }),
        "aria-current": s.key === state.key, "aria-label": `step ${s.step}`,
      }, el("span", { className: "bar" }, el("i", { style: { height: `${(100 * (finite(s.mean) - low)) / (high - low)}%` } })),
        el("small", { textContent: labelled(s, trained) }))))));
  }
  if (held.length) {
    lines.push(el("div", { className: "line" }, el("span", { className: "what", textContent: "held-out, after step" }),
      el("div", { className: "marks" }, ...held.map(s => el("button", {
        onclick: () => go({ key: s.key }), "aria-current": s.key === state.key,
        title: `mean reward ${number(s.mean)} over ${plural(s.rollouts, "rollout")}`,
      }, String(s.step), el("b", { textContent: number(s.mean) }))))));
  }
  $("chart").replaceChildren(...lines);
}

function labelled(step, all) { // the step that is open, the ends, and round numbers that are not too close to either
  const at = all.indexOf(step), open = all.findIndex(s => s.key === state.key), every = Math.ceil(all.length / 80) * 10;
  const far = [open, 0, all.length - 1].every(i => i === at || i < 0 || Math.abs(i - at) * 40 > all.length * 1.5);
  return at === open || ((at === 0 || at === all.length - 1 || step.step % every === 0) && far) ? String(step.step) : "";
}

function choice(name, words, options) {
  const made = el("select", { "aria-label": words, onchange: event => { state.filter[name] = event.target.value; refilter(); } },
    el("option", { value: "", textContent: words }), ...options.map(([value, text]) => el("option", { value, textContent: text })));
  if (state.filter[name] && !options.some(([value]) => value === state.filter[name])) // of another step: kept, and seen to be in force
    made.append(el("option", { value: state.filter[name], textContent: `${state.filter[name]} (0)` }));
  made.value = state.filter[name];
  return made;
}
function tally(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  return [...counts].sort((a, b) => (a[0] < b[0] ? -1 : 1));
}
function refilter() {
  if (!groupsShown().some(each => each.group.g === state.group && each.rollouts.some(r => r.i === state.index))) first();
  go({ group: state.group });
}
function drawFilters() {
  const here = summary(state.key), all = block(state.key).groups.flatMap(g => g.rollouts);
  const kind = run.steps.filter(s => s.heldOut === here.heldOut), at = kind.indexOf(here);
  const rewards = tally(all.map(r => r.reward));
  const search = $("filters").querySelector("input") ?? el("input", {
    type: "search", placeholder: "text of prompt or conversation",
    oninput: event => { state.filter.text = event.target.value; refilter(); } });
  search.value = state.filter.text;
  const shown = groupsShown(), count = shown.reduce((n, each) => n + each.rollouts.length, 0);
  const focused = document.activeElement === search, few = here.shown < here.rollouts;
  const whole = few ? `; the step has ${here.rollouts} in ${here.groups} groups, and this page ${here.shownGroups} of them` : "";
  $("filters").replaceChildren(
    el("header", {}, el("b", { textContent: here.heldOut ? `Held-out, after step ${here.step}` : `Step ${here.step}` }),
      plainButton("‹", "step before  [", () => moveStep(-1), at <= 0),
      plainButton("›", "next step  ]", () => moveStep(1), at >= kind.length - 1)),
    choice("reward", "any reward", [[">0", "above 0"], ["<=0", "0 or less"], ["differ", "groups that differ"],
      ...(rewards.length <= 12 ? rewards.map(([value, n]) => [String(value), `reward ${number(value)} (${n})`]) : [])]),
    choice("label", "any label", tally(all.flatMap(r => r.labels)).map(([value, n]) => [value, `${value} (${n})`])),
    choice("stop", "any end", tally(all.map(r => r.stop)).map(([value, n]) => [value, `${value} (${n})`])),
    choice("order", "in order", [["mismatch", "largest mismatch first"], ["reward", "lowest reward first"]]),
    search,
    el("div", { className: "count" }, `${count} of ${plural(all.length, "rollout")}${whole}; mean reward ${number(here.mean)}`));
  if (focused) search.focus();
}

const tone = reward => (reward > 0 ? "var(--good)" : "var(--bad)");
function drawGroups() {
  const list = groupsShown().map(({ group, rollouts }) => el("div", { className: group.g === state.group ? "group here" : "group" },
    el("div", { className: "prompt", textContent: group.prompt, title: group.id }),
    el("div", { className: "gold", textContent: `gold ${group.gold}` }),
    el("div", { className: "chips" }, ...rollouts.map(r => el("button", {
      textContent: number(r.reward), title: `rollout ${r.i}: reward ${number(r.reward)}, ${r.labels.join(", ") || r.stop}`,
      style: { "--tone": tone(r.reward) }, "aria-current": group.g === state.group && r.i === state.index,
      onclick: () => go({ group: group.g, index: r.i }),
    })))));
  const nothing = summary(state.key).shown ? "Nothing matches these filters." : "This page had no room for this step (--max-tokens).";
  $("groups").replaceChildren(...(list.length ? list : [el("div", { className: "none", textContent: nothing })]));
  $("groups").querySelector(".here")?.scrollIntoView({ block: "nearest" });
}

function drawRollout() {
  const { group, rollout } = chosen();
  $("rollout").classList.toggle("long", (rollout?.t.length ?? 0) > 5000);
  if (!rollout) return $("rollout").replaceChildren(el("p", { className: "none", textContent: "No rollout is chosen." }));
  const facts = [
    ["answer", el("code", { textContent: rollout.answer ?? "none" })], ["gold", el("code", { textContent: group.gold })],
    ["ended by", rollout.stop], ["tool calls", String(rollout.calls)],
    ["tokens", `${rollout.t.length}, ${rollout.lp.length} of them sampled`], ["policy version", span(rollout.v, number)],
    ["advantage", span(rollout.adv, signed)], ["largest mismatch", extreme(rollout.mm)],
    ...rollout.parts.map(([name, value]) => [name, number(value)]),
  ];
  const others = (Object.hasOwn(run.prompts, group.id) ? run.prompts[group.id] : []).filter(key => key !== state.key);
  $("rollout").replaceChildren(
    el("header", {}, el("h2", { textContent: `${group.id} #${rollout.i}` }),
      el("span", { className: "pill", textContent: `reward ${number(rollout.reward)}`, style: { "--tone": tone(rollout.reward) } }),
      ...rollout.labels.map(label => el("span", { className: "pill", textContent: label })),
      el("span", { className: "steps" },
        plainButton("‹", "rollout before  ←", () => move(-1)), plainButton("›", "next rollout  →", () => move(1)))),
    el("dl", {}, ...facts.map(([name, value]) => el("div", {}, el("dt", { textContent: name }), el("dd", {}, value)))),
    others.length ? el("div", { className: "again" }, "the same prompt:", ...others.map(key => {
      const there = summary(key);
      return el("a", { href: `#${key}`, textContent: there.heldOut ? `held-out after ${there.step}` : `step ${there.step}`,
        onclick: event => { event.preventDefault(); same(key, group.id, rollout.i); } });
    })) : "",
    legend(rollout), ...messages(rollout));
}
function span(list, show) {
  const known = real(list);
  if (!known.length) return "not known";
  const [low, high] = extremes(known);
  return low === high ? show(low) : `${show(low)} to ${show(high)}`;
}
function extreme(list) {
  const known = real(list);
  return known.length ? `${signed(known.reduce((a, b) => (Math.abs(b) > Math.abs(a) ? b : a)))} nats` : "not known";
}

function legend(rollout) {
  const { by } = state, parts = [], limit = summary(state.key).limits[by], hues = run.hues[by];
  const key = (colour, words) => el("span", { className: "key" }, el("i", { style: { background: colour } }), words);
  if (by === "version") {
    for (const version of [...new Set(real(rollout.v))]) parts.push(key(ground(version), `sampled by policy ${version}`));
  } else if (by === "none" || !real(rollout[FIELD[by]]).length) {
    parts.push(key("var(--sampled)", by === "none" ? "sampled by the policy" : `sampled; its ${MEASURES[by]} is not known`));
  } else if (!(limit > 0)) {
    parts.push(key("var(--sampled)", `every ${MEASURES[by]} of this step is 0`));
  } else {
    const [below, above] = hues, both = by !== "logp";
    const stops = [-1, -0.5, -0.25, 0, 0.25, 0.5, 1].filter(x => both || x <= 0);
    const colours = stops.map(x => (x === 0 ? "transparent" : mix(x > 0 ? above : below, Math.abs(strength(x * limit, limit)))));
    parts.push(`${MEASURES[by]}${by === "mismatch" ? ", trainer minus engine," : ""} from ${number(-limit)}`,
      el("span", { className: "ramp", style: { background: `linear-gradient(90deg, ${colours.join(", ")})` } }),
      `to ${both ? signed(limit) : 0}${by === "advantage" ? "" : " nats"}`, key("var(--sampled)", "sampled"));
  }
  parts.push(key("transparent", "not sampled"));
  if (by in FIELD && by !== "version" && by !== "advantage" && real(rollout[FIELD[by]]).length) {
    const places = sampledPlaces(rollout);
    const top = places.map((t, n) => [of(rollout[FIELD[by]], n), t]).filter(([x]) => typeof x === "number" && x !== 0)
      .sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, 6);
    const buttons = top.map(([x, t]) => el("button", { title: `token ${t}`, onclick: () => flash(t) },
      bytes(pieces[rollout.t[t]][1]), el("span", { textContent: `  ${signed(x)}` })));
    if (top.length) parts.push(el("span", { className: "strongest" }, by === "logp" ? "least likely:" : "largest:", ...buttons));
  }
  return el("div", { className: "legend" }, ...parts);
}
function sampledPlaces(rollout) {
  const places = [];
  let at = 0;
  rollout.s.forEach((length, n) => { if (n % 2) for (let t = at; t < at + length; t++) places.push(t); at += length; });
  return places;
}
function flash(place) {
  const token = $("rollout").querySelector(`[data-t="${place}"]`);
  token.scrollIntoView({ block: "center", behavior: "smooth" });
  token.classList.remove("flash");
  void token.offsetWidth; // begins the animation anew
  token.classList.add("flash");
}

function messages(rollout) {
  const order = new Map(sampledPlaces(rollout).map((t, n) => [t, n])); // place of a token -> its number among the sampled ones
  let at = 0;
  const stretch = (length, frame) => {
    const made = el("div", { className: frame ? "tokens frame" : "tokens" });
    for (const end = at + length; at < end; at++) made.append(token(rollout, at, order.get(at)));
    return length ? made : null;
  };
  return rollout.m.map(([role, name, channel, recipient, header, body, end]) => {
    const spoken = recipient ? "call" : channel === "final" ? "final" : "analysis";
    const begin = at, kind = role === "assistant" ? spoken : role === "?" ? "bad" : role;
    const parts = [stretch(header, true), stretch(body, false), stretch(end, true)].filter(Boolean);
    const sampled = Array.from({ length: at - begin }, (_, n) => begin + n).filter(t => order.has(t)).length;
    return el("section", { className: sampled ? "message" : "message given", style: { "--tone": `var(--${kind})` } },
      el("div", { className: "who" }, el("b", { textContent: role === "tool" ? name : ROLE_NAME[role] }),
        role === "tool" ? el("span", { textContent: "tool's answer" }) : null,
        recipient && role !== "tool" ? el("span", { textContent: `calls ${recipient}` }) : null,
        channel && role !== "tool" ? el("span", { textContent: channel }) : null,
        el("em", { textContent: sampled ? `${sampled} sampled` : `${plural(at - begin, "token")}, given` })),
      ...parts);
  });
}
function token(rollout, place, n) {
  const [, text, special] = pieces[rollout.t[place]];
  const made = el("span", { className: "t" + (n === undefined ? "" : " on") + (special ? " special" : "") + (text === "" ? " part" : "")
    + (/^\n/.test(text) && n !== undefined ? " newline" : ""), textContent: text });
  made.dataset.t = place;
  if (n !== undefined && state.by in FIELD) {
    const colour = ground(of(rollout[FIELD[state.by]], n));
    if (colour) made.style.backgroundImage = `linear-gradient(${colour}, ${colour})`; // over the ground of what is sampled
  }
  return made;
}

// ---- the card beside a token

function showTip(target) {
  const { rollout } = chosen(), place = Number(target.dataset.t), [id, text] = pieces[rollout.t[place]];
  const n = sampledPlaces(rollout).indexOf(place), rows = [["token", `${id}, at ${place}`]];
  if (n >= 0) {
    const logp = rollout.lp[n], gap = of(rollout.mm, n), advantage = of(rollout.adv, n);
    rows.push(["engine's log-prob", `${number(logp, 4)}` + (typeof logp === "number" ? `, probability ${number(Math.exp(logp))}` : "")]);
    if (gap !== null) rows.push(["trainer minus engine", `${signed(gap)} nats`]);
    if (advantage !== null) rows.push(["advantage", signed(advantage)]);
    rows.push(["policy version", number(of(rollout.v, n))]);
  } else rows.push(["", "given, not sampled"]);
  $("tip").replaceChildren(el("code", { textContent: text === "" ? "part of a character" : bytes(text) }),
    el("table", {}, ...rows.map(([name, value]) => el("tr", {}, el("td", { textContent: name }), el("td", { textContent: value })))));
  $("tip").hidden = false;
  const box = target.getBoundingClientRect(), card = $("tip").getBoundingClientRect();
  $("tip").style.left = `${Math.max(8, Math.min(box.left, innerWidth - card.width - 8))}px`;
  $("tip").style.top = `${box.bottom + card.height + 10 < innerHeight ? box.bottom + 6 : box.top - card.height - 6}px`;
}
$("rollout").addEventListener("mouseover", event => {
  const target = event.target.closest(".t");
  if (target) showTip(target); else $("tip").hidden = true;
});
$("rollout").addEventListener("mouseleave", () => { $("tip").hidden = true; });
addEventListener("scroll", () => { $("tip").hidden = true; }, { passive: true });

// ---- keys, colours of the page, beginning

function theme(name) { document.documentElement.dataset.theme = name; }
addEventListener("keydown", event => {
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const by = Object.keys(MEASURES);
  const does = { ArrowLeft: () => move(-1), ArrowRight: () => move(1), "[": () => moveStep(-1), "]": () => moveStep(1),
    c: () => go({ by: by[(by.indexOf(state.by) + 1) % by.length] }) }[event.key];
  if (does) { event.preventDefault(); does(); }
});
addEventListener("hashchange", () => { fromHash(); draw(); });
const hints = [["←", "→", " rollouts   "], ["[", "]", " steps   "], ["c", " colour"]].flatMap(([...keys]) => {
  const words = keys.pop();
  return [...keys.flatMap(key => [el("kbd", { textContent: key }), " "]), words];
});
document.body.insertBefore(el("footer", {}, ...hints), $("tip"));
theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
fromHash();
draw();
