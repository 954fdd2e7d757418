// Shows openapi.json, and calls services. What workers say is only ever put into the page as text.
"use strict";

const SERVICES = "/services/";
const JSON_TYPE = "application/json";
const LINES_TYPE = "application/x-ndjson";
const at = (id) => document.getElementById(id);

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function headers(more = {}) {
  const token = at("token").value;
  return token ? { authorization: `Bearer ${token}`, ...more } : more;
}

// Returns a schema with the components that it refers to, as they are needed to read it.
function withComponents(schema, document) {
  const found = {};
  const follow = (text) => {
    for (const [, name] of text.matchAll(/"#\/components\/schemas\/([^"]+)"/g)) {
      if (name in found || !(name in document.components.schemas)) continue;
      found[name] = document.components.schemas[name];
      follow(JSON.stringify(found[name]));
    }
  };
  follow(JSON.stringify(schema));
  const shown = { ...schema, ...(Object.keys(found).length ? { $defs: found } : {}) };
  return JSON.stringify(shown, null, 2).replaceAll("#/components/schemas/", "#/$defs/");
}

function schemaOf(title, content, document) {
  const schema = (content?.[JSON_TYPE] ?? content?.[LINES_TYPE])?.schema;
  const text = schema ? withComponents(schema, document) : Object.keys(content ?? {}).join(", ") || "nothing";
  return element("div", {}, element("h2", { textContent: title }), element("pre", { textContent: text }));
}

function form(path, operation) {
  const content = operation.requestBody?.content ?? {};
  const typed = JSON_TYPE in content;
  const streams = "text/event-stream" in operation.responses["200"].content && typed;
  const body = element("textarea", { spellcheck: false, ariaLabel: "Body" });
  if (typed) body.value = JSON.stringify(content[JSON_TYPE].example ?? null, null, 2);
  const button = element("button", { textContent: "Call", type: "submit" });
  const result = element("pre", { hidden: true });
  const made = element("form", {}, element("h2", { textContent: "Try it" }), body, button, result);
  made.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    result.hidden = false;
    result.className = "";
    result.textContent = "…";
    const more = typed ? { "content-type": JSON_TYPE } : { "content-type": "application/octet-stream" };
    if (streams) more.accept = "text/event-stream";
    try {
      const response = await fetch(path.slice(1), { method: "POST", headers: headers(more), body: body.value });
      result.className = response.ok ? "" : "bad";
      result.textContent = `${response.status}\n`;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        result.append(value);
      }
    } catch (error) {
      result.className = "bad";
      result.textContent = String(error);
    }
    button.disabled = false;
  });
  return made;
}

function service(path, operation, document) {
  const name = decodeURIComponent(path.slice(SERVICES.length));
  const details = element("details", {}, element("summary", { textContent: name }));
  details.dataset.text = `${name} ${operation.description ?? ""}`.toLowerCase();
  details.addEventListener("toggle", () => {
    if (details.children.length > 1) return;
    details.append(
      element("p", { className: "description", textContent: operation.description ?? "" }),
      element("div", { className: "columns" },
        schemaOf("Request", operation.requestBody?.content, document),
        schemaOf("Reply", operation.responses["200"].content, document)),
      form(path, operation));
  });
  return details;
}

async function load() {
  const state = at("state");
  state.className = "";
  at("services").replaceChildren();
  try {
    const response = await fetch("openapi.json", { headers: headers() });
    at("login").hidden = response.status !== 401 && !at("token").value;
    if (!response.ok) throw new Error((await response.json()).detail);
    const found = await response.json();
    const paths = Object.entries(found.paths).filter(([path]) => path.startsWith(SERVICES));
    at("services").append(...paths.map(([path, item]) => service(path, item.post, found)));
    state.textContent = paths.length ? "" : "No services are offered now.";
  } catch (error) {
    state.className = "bad";
    state.textContent = error.message;
  }
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  load();
});
at("search").addEventListener("input", (event) => {
  const wanted = event.target.value.toLowerCase();
  for (const each of at("services").children) each.hidden = !each.dataset.text.includes(wanted);
});
load();
