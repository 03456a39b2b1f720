/** The last line of a run in the lab: how many tests passed, failed and were skipped, for whoever started the lab. */
export default class TotalsReporter {
  /** @param {readonly import('vitest/node').TestModule[]} modules @param {readonly unknown[]} unhandled */
  onTestRunEnd(modules, unhandled) {
    const totals = { passed: 0, failed: unhandled.length, skipped: 0 };
    for (const module of modules) {
      const failedBefore = totals.failed;
      for (const test of module.children.allTests()) {
        const { state } = test.result();
        if (state === 'passed' || state === 'failed') totals[state]++;
        else totals.skipped++;
      }
      // A file that could not be loaded, or whose hooks failed, has no test to blame.
      if (module.state() === 'failed' && totals.failed === failedBefore) totals.failed++;
    }
    process.stdout.write(`\nlab: ${totals.passed} passed, ${totals.failed} failed, ${totals.skipped} skipped\n`);
  }
}
