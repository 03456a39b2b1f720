/** Figures, in bench/results/ (not kept in git). */
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { projectRoot } from './dsec-command.ts';

/** Answers the path of the file, from the project's root. */
export function saveFigure(name: string, svg: string): string {
  const path = join('bench/results', `${name}.svg`);
  mkdirSync(join(projectRoot(), 'bench/results'), { recursive: true });
  writeFileSync(join(projectRoot(), path), svg);
  console.log(`figure: ${path}`);
  return path;
}

/** Rows of text with their columns aligned: the first to the left, the others to the right. */
export function printTable(rows: readonly (readonly (string | number)[])[]): void {
  const widths = rows[0]!.map((_, column) => Math.max(...rows.map((row) => String(row[column]).length)));
  for (const row of rows) {
    console.log(
      row
        .map((cell, column) => {
          const text = String(cell);
          return column === 0 ? text.padEnd(widths[column]!) : text.padStart(widths[column]!);
        })
        .join('  '),
    );
  }
}
