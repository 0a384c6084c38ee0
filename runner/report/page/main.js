  // ---- controls -----------------------------------------------------------------------------------------------

  function options(select, list, value) {
    const signature = JSON.stringify(list);
    if (select.dataset.signature !== signature) {
      select.dataset.signature = signature;
      select.replaceChildren(...list.map(([key, label]) => new Option(label, key)));
    }
    if (value !== undefined) select.value = value;
  }
  function metricOptions() {
    const kinds = [["results", data.results], ["other numbers", plottable.filter((name) => !isResult(name))]];
    element("metric").replaceChildren(...kinds.filter(([, names]) => names.length).map(([kind, names]) => {
      const group = make("optgroup");
      group.label = kind;
      group.append(...names.map((name) => new Option(name, name)));
      return group;
    }));
  }
  function showState() {
    element("metric").value = state.metric;
    element("x").value = state.x;
    element("by").value = JSON.stringify(state.by);
    element("logx").checked = state.logx;
    element("logy").checked = state.logy;
    element("filter").value = state.filter;
    element("smooth").value = String(state.smooth);
    element("smooth-at").textContent = state.smooth ? state.smooth.toFixed(2) : "none";
    checkboxes(element("panels"), plottable.map((name) => [name, name, state.panels.includes(name)]), (names) => { state.panels = names; });
  }
  function drawAll() {
    remember(); showState();
    drawCurves(); drawGroups(); drawRuns(); drawSettings(); drawMedia(); drawOne(); drawHardware(); drawTimeline(); drawGoodput();
  }
  function listen(id, event, change) { element(id).addEventListener(event, () => { change(element(id)); drawAll(); }); }

  // The compressed script of Plotly is in the page once. A browser too old to unpack it shows everything but the plots.
  async function unpackPlotly() {
    if (typeof DecompressionStream === "undefined") {
      element("too-old").hidden = false;
      globalThis.Plotly = { react() {}, purge() {} };
      return;
    }
    const stream = new Blob([bytes(element("plotly").textContent)]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }
  function prepare() {
    document.title = "Report: " + data.title;
    element("title").textContent = data.title;
    element("summary").textContent = data.summary;
    document.body.classList.toggle("single", single);
    element("forks-section").hidden = !data.forks.length;
    element("forks").textContent = data.forks.join("\n");
    metricOptions();
    options(element("x"), data.axes);
    const nameOf = (keys) => (keys.length > 1 ? keys.map((key) => data.short[key]).join(" and ") : keys[0] || "(nothing: one curve per run)");
    options(element("by"), groupings.map((keys) => [JSON.stringify(keys), nameOf(keys)]));
    options(element("one"), data.runs.map((run) => [run.name, run.name]));
    options(element("beside"), [["", "(no other)"], ...data.runs.map((run) => [run.name, run.name])]);
    drawConstants();
    listen("metric", "change", (made) => { state.metric = made.value; });
    listen("x", "change", (made) => { state.x = made.value; });
    listen("by", "change", (made) => { state.by = JSON.parse(made.value); });
    listen("logx", "change", (made) => { state.logx = made.checked; });
    listen("logy", "change", (made) => { state.logy = made.checked; });
    listen("filter", "input", (made) => { state.filter = made.value; });
    listen("smooth", "input", (made) => { state.smooth = Number(made.value); });
    listen("media", "change", (made) => { state.media = made.value; state.at = -1; });
    listen("setting", "change", (made) => { state.setting = made.value; });
    listen("columns-usual", "click", () => { state.columns = null; });
    element("one").addEventListener("change", (event) => choose(runNamed(event.target.value)));
    element("beside").addEventListener("change", (event) => { state.beside = event.target.value; remember(); drawOne(); });
    addEventListener("hashchange", () => { recall(); drawAll(); });
  }
  const isZoomed = () => { const { xaxis, yaxis } = element("curves").layout; return xaxis.autorange === false || yaxis.autorange === false; };

  recall();
  prepare();
  await unpackPlotly();
  drawAll();
  let width = innerWidth, timer = 0;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; clearTimeout(timer); timer = setTimeout(drawAll, 150); } });
  if (data.refresh) setInterval(() => { if (!isZoomed()) location.reload(); }, 1000 * data.refresh);
  document.body.dataset.drawn = "yes";
