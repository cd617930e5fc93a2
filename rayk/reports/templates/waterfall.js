// The stages of a cell's requests, and of one of them.
(function () {
  "use strict";
  var source = document.getElementById("waterfall-data");
  if (!source) { return; }
  var told = JSON.parse(source.textContent), parts = told.parts;
  var cellBox = document.getElementById("waterfall-cell"), requestBox = document.getElementById("waterfall-request");
  function fill(box, names) {
    box.replaceChildren.apply(box, names.map(function (name, index) { return new Option(name, index); }));
  }
  function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
  // Blocks to push into are reserved before the prompt is computed.
  function order(cell) {
    var names = parts.map(function (part, index) { return index; });
    if (!cell.push) { return names; }
    var reserve = names.filter(function (i) { return parts[i].name === "reserve"; });
    var others = names.filter(function (i) { return parts[i].name !== "reserve"; });
    return others.slice(0, 1).concat(reserve, others.slice(1));
  }
  function starts(cell, request) {
    var at = told.aligned ? 0 : request[1], found = [];
    order(cell).forEach(function (i) { found[i] = at; at += request[2][i]; });
    return found;
  }
  function trace(part, names, bases, widths) {
    return {
      type: "bar", orientation: "h", name: part.name, y: names, base: bases, x: widths,
      marker: { color: part.colour }, customdata: widths,
      hovertemplate: part.name + ": %{customdata:.3f} ms<br>" + part.meaning + "<extra></extra>"
    };
  }
  function ofAll(cell) {
    return parts.map(function (part, i) {
      return trace(part, cell.requests.map(function (r) { return r[0]; }),
        cell.requests.map(function (r) { return starts(cell, r)[i]; }),
        cell.requests.map(function (r) { return r[2][i]; }));
    });
  }
  function ofOne(cell, request) {
    var at = starts(cell, request);
    return order(cell).map(function (i) {
      var data = trace(parts[i], [parts[i].name], [at[i]], [request[2][i]]);
      data.text = [request[2][i].toFixed(2) + " ms"];
      data.textposition = "outside";
      data.cliponaxis = false;
      return data;
    });
  }
  function draw(Plotly) {
    var cell = told.cells[+cellBox.value], one = +requestBox.value - 1;
    var data = one < 0 ? ofAll(cell) : ofOne(cell, cell.requests[one]);
    var rows = one < 0 ? cell.requests.length : parts.length;
    var end = 0, shown = one < 0 ? cell.requests : [cell.requests[one]];
    function due(r) { return told.aligned ? 0 : r[1]; }
    shown.forEach(function (r) { end = Math.max(end, due(r) + r[2].reduce(function (a, b) { return a + b; }, 0)); });
    var begin = one < 0 ? 0 : due(shown[0]);
    var axis = told.aligned ? "ms after the request was due" : "ms after the repeat began";
    var line = colour("--line");
    // Of hundreds of requests the picture is what counts, not their names.
    var each = Math.max(3, Math.min(24, 1000 / rows));
    Plotly.react("waterfall", data, {
      barmode: "overlay", height: 80 + Math.max(3, rows) * each, showlegend: false, hovermode: "closest", bargap: 0.25,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 40, r: 14, t: 8, b: 40 },
      font: { family: "system-ui, sans-serif", size: 12, color: colour("--soft") },
      hoverlabel: { bgcolor: colour("--ink"), font: { color: colour("--bg") }, align: "left" },
      xaxis: { title: { text: axis }, range: [begin, begin + (end - begin) * (one < 0 ? 1.02 : 1.18)],
               gridcolor: line, zerolinecolor: line, fixedrange: true },
      yaxis: { type: "category", showticklabels: each > 11, autorange: "reversed", automargin: true, fixedrange: true, gridcolor: line }
    }, { displayModeBar: false, responsive: true });
  }
  function redraw() { if (window.Plotly) { draw(window.Plotly); } }
  function chooseCell() {
    var cell = told.cells[+cellBox.value];
    var all = "all" + (cell.of > cell.requests.length ? " (the first " + cell.requests.length + ")" : "");
    fill(requestBox, [all].concat(cell.requests.map(function (r) { return r[0]; })));
    redraw();
  }
  var legend = document.getElementById("waterfall-legend"), words = document.getElementById("waterfall-words");
  parts.forEach(function (part) {
    var item = document.createElement("span"), mark = document.createElement("i");
    var name = document.createElement("dt"), meaning = document.createElement("dd");
    mark.style.background = part.colour;
    item.append(mark, part.name);
    legend.append(item);
    name.textContent = part.name;
    meaning.textContent = part.meaning;
    words.append(name, meaning);
  });
  fill(cellBox, told.cells.map(function (cell) { return cell.id; }));
  cellBox.addEventListener("change", chooseCell);
  requestBox.addEventListener("change", redraw);
  chooseCell();
  window.raykLater(document.getElementById("waterfall"), 160, draw);
})();
