/**
 * The answer of a lookup: the runs of sectors that a range is made of, in order and without gaps. One object is used again and
 * again, since lookups are what every read begins with; its arrays grow when they must.
 *
 * `layers[i]` is the layer that has the bytes, `moffsets[i]` where they are in its file; HOLE was never written, ZEROED is
 * written as zeros and hides what lies below.
 */
export const HOLE = -1;
export const ZEROED = -2;

export class Pieces {
  count = 0;
  starts = new Float64Array(16);
  ends = new Float64Array(16);
  moffsets = new Float64Array(16);
  layers = new Int16Array(16);

  clear(): void {
    this.count = 0;
  }

  /** Joins the piece to the one before where both are one run. */
  add(start: number, end: number, moffset: number, layer: number): void {
    const last = this.count - 1;
    if (
      last >= 0 &&
      this.layers[last] === layer &&
      (layer < 0 || this.moffsets[last]! + (this.ends[last]! - this.starts[last]!) === moffset)
    ) {
      this.ends[last] = end;
      return;
    }
    if (this.count === this.starts.length) this.grow();
    const at = this.count++;
    this.starts[at] = start;
    this.ends[at] = end;
    this.moffsets[at] = moffset;
    this.layers[at] = layer;
  }

  private grow(): void {
    const capacity = this.starts.length * 2;
    const larger = new Float64Array(capacity);
    larger.set(this.starts);
    this.starts = larger;
    const ends = new Float64Array(capacity);
    ends.set(this.ends);
    this.ends = ends;
    const moffsets = new Float64Array(capacity);
    moffsets.set(this.moffsets);
    this.moffsets = moffsets;
    const layers = new Int16Array(capacity);
    layers.set(this.layers);
    this.layers = layers;
  }
}
