// What was measured while this page is open, for the plots. No drawing here.

const KEPT = 1800;
export const MOST = 12; // lines in one plot; of more: the least, the median, the most

export const QUANTITIES = [
  { id: "loss", title: "Loss", unit: "", of: (row) => row.loss ?? null },
  { id: "step", title: "Step time, s", unit: "", of: (row) => row.stepTime ?? null },
  { id: "cpu", title: "CPU, cores in use", unit: "", of: (row) => row.cpu },
  { id: "memory", title: "Memory", unit: "bytes", of: (row) => row.memory_used ?? row.memory ?? null },
  { id: "gpu", title: "GPU utilization, %", unit: "", of: (row) => (row.gpu === null ? null : 100 * row.gpu) },
  { id: "gpu-memory", title: "GPU memory", unit: "bytes", of: (row) => row.gpu_memory_used ?? row.gpu_memory ?? null },
  { id: "network", title: "Network, bytes/s in and out", unit: "bytes", of: (row) => (row.network_in ?? null) === null ? null : row.network_in + row.network_out },
  { id: "output", title: "Output, bytes/s", unit: "bytes", of: (row) => row.output ?? null },
];

export class Series {
  constructor() {
    this.times = [];
    this.rows = { host: [], rank: [] };
    this.printed = new Map();
  }

  add(view) {
    if (this.times.at(-1) >= view.time) return;
    const seconds = this.times.length ? view.time - this.times.at(-1) : null;
    const hosts = new Map(), ranks = new Map();
    for (const host of view.hosts) {
      const times = [];
      let output = null;
      for (const row of host.ranks) {
        const before = this.printed.get(row.rank);
        const rate = before === undefined || !seconds ? null : Math.max(0, row.printed - before) / seconds;
        this.printed.set(row.rank, row.printed);
        if (rate !== null) output = (output ?? 0) + rate;
        const stepTime = row.rate ? 1 / row.rate : null;
        if (stepTime !== null) times.push(stepTime);
        ranks.set(row.rank, { ...row, output: rate, stepTime });
      }
      hosts.set(host.host, { ...host, output, stepTime: times.length ? Math.max(...times) : null, loss: host.ranks[0]?.loss });
    }
    this.times.push(view.time);
    this.rows.host.push(hosts);
    this.rows.rank.push(ranks);
    if (this.times.length > KEPT) for (const list of [this.times, this.rows.host, this.rows.rank]) list.shift();
  }

  // The lines of one plot: their labels, and the values of each. Null where nothing is known at all.
  lines(by, quantity) {
    const rows = this.rows[by];
    const keys = [...new Set(rows.flatMap((one) => [...one.keys()]))].sort((one, other) => (one > other ? 1 : -1));
    const values = keys.map((key) => rows.map((one) => (one.has(key) ? quantity.of(one.get(key)) ?? null : null)));
    const known = keys.map((_, at) => at).filter((at) => values[at].some((value) => value !== null));
    if (!known.length) return null;
    if (known.length <= MOST)
      return { labels: known.map((at) => (by === "rank" ? `rank ${keys[at]}` : keys[at])), values: known.map((at) => values[at]) };
    const sorted = rows.map((_, time) => known.map((at) => values[at][time]).filter((value) => value !== null).sort((one, other) => one - other));
    const pick = (part) => sorted.map((list) => (list.length ? list[Math.round(part * (list.length - 1))] : null));
    return { labels: [`least of ${known.length}`, "median", "most"], values: [pick(0), pick(0.5), pick(1)] };
  }
}
