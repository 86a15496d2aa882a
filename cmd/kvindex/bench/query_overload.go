// This file offers a stage four times what it can do, and sees how it fares.

package bench

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// overload goes on after saturation was found: four times that, then at once a half of
// it.
func (c *queryCase) overload(l *lanes, saturation float64) error {
	if _, err := c.measure("overload", l, 4*saturation, c.Overload); err != nil {
		return err
	}
	over := time.Now()
	t, line, err := c.offered("after", l, saturation/2, c.For)
	if err != nil {
		return err
	}
	if t.failed > 0 {
		return fmt.Errorf("after the overload %d requests failed; the first: %w", t.failed, t.err)
	}
	recovery := figure(max(0, t.trouble.Sub(over)).Microseconds()) / 1e3
	line.Recovery = &recovery
	return c.tell(line)
}

// table tells all but the steps to a reader.
func (b *queryBench) table(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "blocks\tworkers\ttransport\twhat\toffered/s\tanswered/s\trefused\tp50 µs\tp99 µs\tp99.9 µs\trefused p99 µs\tserver µs each\tGC %\tMiB\twritten M/s\trecovery ms")
	for _, l := range b.told {
		if l.What == "step" {
			continue
		}
		recovery := ""
		if l.Recovery != nil {
			recovery = fmt.Sprintf("%.0f", *l.Recovery)
		}
		row := fmt.Sprintf("%d\t%d\t%s\t%s\t%.0f\t%.0f\t%d\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.1f\t%.0f\t%.2f\t%s\n", l.Blocks, l.Workers, l.Transport, l.What, l.Offered, l.Answered,
			l.Refused+l.Unsent, l.P50, l.P99, l.P999, l.No99, l.CPU, l.GC, l.ResidentMiB, l.Written/1e6, recovery)
		fmt.Fprint(tw, strings.ReplaceAll(row, "NaN", "-"))
	}
	return tw.Flush()
}
