// Hover text of the verdict matrices, sortable tables, and plots in the colours of the page.
(function () {
  "use strict";
  var tip = document.getElementById("tip");
  function show(event) {
    var box = event.currentTarget.getBoundingClientRect();
    tip.textContent = event.currentTarget.dataset.tip;
    tip.style.display = "block";
    var left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 12);
    tip.style.left = Math.max(12, left) + window.scrollX + "px";
    tip.style.top = box.bottom + window.scrollY + 8 + "px";
  }
  function hide() { tip.style.display = "none"; }
  document.querySelectorAll("[data-tip]").forEach(function (cell) {
    cell.addEventListener("mouseenter", show);
    cell.addEventListener("focus", show);
    cell.addEventListener("mouseleave", hide);
    cell.addEventListener("blur", hide);
  });

  // Where a page may not write to the clipboard, the command is selected: Ctrl+C copies it.
  document.querySelectorAll(".command button").forEach(function (button) {
    var command = button.previousElementSibling;
    function select() { window.getSelection().selectAllChildren(command); }
    button.addEventListener("click", function () {
      if (!navigator.clipboard) { select(); return; }
      navigator.clipboard.writeText(command.textContent).then(function () {
        button.textContent = "Copied";
        setTimeout(function () { button.textContent = "Copy"; }, 2000);
      }, select);
    });
  });

  function key(row, index) {
    var cell = row.cells[index];
    var text = cell.textContent.trim(), plain = text.replace(/,/g, "");
    // Numbers without a value of their own: 1,234.5 or +6.1% or 1.2 (0.9 to 1.4).
    var number = parseFloat(cell.dataset.value || (/^[+-]?\d+(\.\d+)?(%|\s|$)/.test(plain) ? plain : ""));
    return isNaN(number) ? text : number;
  }
  function compare(a, b) {
    if (typeof a === typeof b) { return a < b ? -1 : a > b ? 1 : 0; }
    return typeof a === "number" ? -1 : 1; // empty cells last
  }
  document.querySelectorAll("th[data-sort]").forEach(function (head) {
    function sort() {
      var table = head.closest("table"), body = table.tBodies[0];
      var sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      table.querySelectorAll("th").forEach(function (h) { h.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      Array.from(body.rows)
        .sort(function (a, b) { return sign * compare(key(a, head.cellIndex), key(b, head.cellIndex)); })
        .forEach(function (row) { body.appendChild(row); });
    }
    head.tabIndex = 0;
    head.addEventListener("click", sort);
    head.addEventListener("keydown", function (event) { if (event.key === "Enter") { sort(); } });
  });

  // Few figures are drawn when the page is loaded, so that whoever takes a picture of it then has them. Many
  // are drawn after that, one at a time: the page opens at once. Plotly is read for the first of them.
  var MANY = 200000; // characters of their data
  var source = document.getElementById("plotly"), waiting = [];
  function library() {
    if (!window.Plotly) {
      var script = document.createElement("script");
      script.textContent = source.textContent;
      document.body.appendChild(script);
    }
    return window.Plotly;
  }
  function drawn(entry) { waiting.splice(waiting.indexOf(entry), 1); entry.draw(library()); }
  function drawAll() { waiting.slice().forEach(drawn); }
  function drawNext() {
    if (!waiting.length) { return; }
    drawn(waiting[0]);
    setTimeout(drawNext, 0);
  }
  window.addEventListener("load", function () {
    if (!source) { return; }
    (document.getElementById("plots").textContent.length < MANY ? drawAll : drawNext)();
  });
  window.addEventListener("beforeprint", drawAll);
  // `draw(Plotly)` soon, and again when the colours or the width change.
  window.raykLater = function (element, height, draw) {
    var entry = { element: element, draw: draw };
    element.style.minHeight = height + "px";
    waiting.push(entry);
    ["(prefers-color-scheme: dark)", "(max-width: 759px)"].forEach(function (query) {
      window.matchMedia(query).addEventListener("change", function () {
        if (waiting.indexOf(entry) < 0) { draw(library()); }
      });
    });
  };
  if (!source) { return; }
  function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
  var plots = JSON.parse(document.getElementById("plots").textContent);
  // "mark", "mark2", "soft" and "series1" to "series6" are the page's colours by name.
  function paint(item) {
    if (item && /^(mark2?|soft|series[1-6])$/.test(item.color)) { item.color = colour("--" + item.color); }
  }
  function axis(extra) {
    return Object.assign({
      gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"),
      automargin: true, fixedrange: true
    }, extra);
  }
  // A long name on two lines of at most `width` characters; what finds no room is left out of its middle.
  function fold(name, width) {
    if (name.length <= width) { return [name]; }
    var cut = name.lastIndexOf("-", width - 1) + 1;
    if (cut < width / 2) { cut = width; }
    var rest = name.slice(cut);
    if (rest.length > width) {
      var tail = Math.ceil(width * 0.6);
      rest = rest.slice(0, width - tail - 1) + "…" + rest.slice(-tail);
    }
    return [name.slice(0, cut), rest];
  }
  // Plotly reads some tags in texts; names are no markup.
  function plain(text) { return text.replace(/&/g, "&amp;").replace(/</g, "&lt;"); }
  // Names of cells take two fifths of a plot's width at most; pointing at one shows all of it.
  function nameRows(plot, layout) {
    if (layout.yaxis.type !== "category") { return; }
    var element = document.getElementById(plot.id), names = Array.from(new Set(plot.data[0].y));
    var width = Math.max(12, Math.floor(0.4 * element.clientWidth / (0.54 * layout.font.size)));
    layout.yaxis.tickvals = names;
    layout.yaxis.ticktext = names.map(function (name) { return fold(name, width).map(plain).join("<br>"); });
    if (names.some(function (name) { return name.length > width; })) { layout.height += 8 * names.length; }
    element.dataset.names = JSON.stringify(names);
  }
  function titleRows(id) {
    var element = document.getElementById(id);
    if (!element.dataset.names) { return; }
    var names = JSON.parse(element.dataset.names);
    element.querySelectorAll(".ytick > text").forEach(function (text, index) {
      var title = document.createElementNS("http://www.w3.org/2000/svg", "title");
      title.textContent = names[index];
      text.appendChild(title);
    });
  }
  function draw(Plotly, plot) {
    var narrow = document.documentElement.clientWidth < 760;
    var data = JSON.parse(JSON.stringify(plot.data));
    data.forEach(function (trace) {
      trace.marker = Object.assign({ color: "mark" }, trace.marker);
      [trace.marker, trace.line, trace.error_y].forEach(paint);
      if (trace.marker.colorscale === "page") {
        trace.marker.colorscale = [[0, colour("--mark")], [1, colour("--mark2")]];
        if (narrow) { Object.assign(trace.marker.colorbar, { orientation: "h", y: 1.02, yanchor: "bottom" }); }
      }
      if (trace.type === "box") { trace.line = { color: colour("--mark"), width: 1.2 }; trace.fillcolor = colour("--hover"); }
    });
    var layout = Object.assign({
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      margin: { l: 50, r: 14, t: 8, b: 44 }, hovermode: "closest",
      font: { family: "system-ui, sans-serif", size: narrow ? 10.5 : 12, color: colour("--soft") },
      hoverlabel: { bgcolor: colour("--ink"), font: { color: colour("--bg") }, align: "left" }
    }, plot.layout);
    layout = JSON.parse(JSON.stringify(layout));
    (layout.shapes || []).forEach(function (shape) { paint(shape.line); });
    (layout.annotations || []).forEach(function (note) { paint(note.font); });
    if (layout.legend && narrow) {
      layout.legend.font = { size: 10 };
      layout.height += 14 * Math.ceil(data.length / 3); // names take more lines, the figure keeps its height
    }
    layout.xaxis = axis(plot.layout.xaxis);
    layout.yaxis = axis(plot.layout.yaxis);
    nameRows(plot, layout);
    Plotly.react(plot.id, data, layout, { displayModeBar: false, responsive: true })
      .then(function () { titleRows(plot.id); });
  }
  plots.forEach(function (plot) {
    window.raykLater(document.getElementById(plot.id), plot.layout.height, function (Plotly) { draw(Plotly, plot); });
  });
})();
