/** Counters, gauges and histograms in Prometheus' text format (version 0.0.4): the few kinds that the service needs. */

type Labels = Readonly<Record<string, string | number>>;

interface Family {
  readonly help: string;
  readonly type: 'counter' | 'gauge' | 'histogram';
  text(name: string): string;
}

export class Metrics {
  readonly #families = new Map<string, Family>();

  counter(name: string, help: string): Counter {
    return this.#add(name, new Counter(help));
  }

  /** Read when the metrics are asked for. */
  gauge(name: string, help: string, read: () => number | readonly (readonly [Labels, number])[]): void {
    this.#add(name, { help, type: 'gauge', text: (metric: string) => gaugeText(metric, read()) });
  }

  /** A counter that is kept elsewhere, read when the metrics are asked for. */
  total(name: string, help: string, read: () => readonly (readonly [Labels, number])[]): void {
    this.#add(name, { help, type: 'counter', text: (metric: string) => gaugeText(metric, read()) });
  }

  histogram(name: string, help: string, bounds: readonly number[]): Histogram {
    return this.#add(name, new Histogram(help, bounds));
  }

  #add<T extends Family>(name: string, family: T): T {
    this.#families.set(name, family);
    return family;
  }

  text(): string {
    let out = '';
    for (const [name, family] of this.#families) {
      out += `# HELP ${name} ${family.help}\n# TYPE ${name} ${family.type}\n${family.text(name)}`;
    }
    return out;
  }
}

class Counter implements Family {
  readonly type = 'counter';
  readonly help: string;
  readonly #values = new Map<string, number>();

  constructor(help: string) {
    this.help = help;
  }

  add(labels: Labels = {}, by = 1): void {
    this.of(labels)(by);
  }

  /** `add` for these labels: where it is called often. */
  of(labels: Labels): (by?: number) => void {
    const key = labelText(labels);
    return (by = 1) => void this.#values.set(key, (this.#values.get(key) ?? 0) + by);
  }

  text(name: string): string {
    return [...this.#values].map(([labels, value]) => `${name}${labels} ${value}\n`).join('');
  }
}

class Histogram implements Family {
  readonly type = 'histogram';
  readonly help: string;
  readonly #bounds: readonly number[];
  readonly #series = new Map<string, { labels: Labels; counts: number[]; sum: number; count: number }>();

  constructor(help: string, bounds: readonly number[]) {
    this.help = help;
    this.#bounds = bounds;
  }

  observe(labels: Labels, value: number): void {
    this.of(labels)(value);
  }

  /** `observe` for these labels: where it is called often. */
  of(labels: Labels): (value: number) => void {
    const key = labelText(labels);
    const series = this.#series.get(key) ?? { labels, counts: this.#bounds.map(() => 0), sum: 0, count: 0 };
    this.#series.set(key, series);
    const bounds = this.#bounds;
    return (value) => {
      series.sum += value;
      series.count++;
      for (let k = bounds.length - 1; k >= 0 && value <= bounds[k]!; k--) series.counts[k]!++;
    };
  }

  text(name: string): string {
    let out = '';
    for (const { labels, counts, sum, count } of this.#series.values()) {
      this.#bounds.forEach((le, k) => {
        out += `${name}_bucket${labelText({ ...labels, le })} ${counts[k]}\n`;
      });
      out += `${name}_bucket${labelText({ ...labels, le: '+Inf' })} ${count}\n`;
      out += `${name}_sum${labelText(labels)} ${sum}\n${name}_count${labelText(labels)} ${count}\n`;
    }
    return out;
  }
}

function gaugeText(name: string, value: number | readonly (readonly [Labels, number])[]): string {
  const rows = typeof value === 'number' ? [[{}, value] as const] : value;
  return rows.map(([labels, number]) => `${name}${labelText(labels)} ${number}\n`).join('');
}

function labelText(labels: Labels): string {
  const pairs = Object.entries(labels).map(([key, value]) => `${key}="${escaped(String(value))}"`);
  return pairs.length === 0 ? '' : `{${pairs.join(',')}}`;
}

function escaped(value: string): string {
  return value.replace(/[\\"\n]/g, (c) => (c === '\n' ? '\\n' : `\\${c}`));
}
