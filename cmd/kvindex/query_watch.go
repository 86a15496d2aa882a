// This file asks a query again and again.

package main

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"time"

	"kvindex/pipeline/query"
	pb "kvindex/pipeline/query/kvindexpb"
)

// matching is what watching needs of a client.
type matching interface {
	Match(context.Context, *pb.MatchRequest) (*pb.MatchResponse, error)
}

// watchMatch shows the answer whenever it has changed, and on a terminal always, until
// the context ends. A query that fails is shown too, and asked again.
func (c *queryConfig) watchMatch(ctx context.Context, con *console, stage matching) error {
	tick := time.NewTicker(c.watch)
	defer tick.Stop()
	for last := ""; ; {
		start := time.Now()
		answer, err := stage.Match(ctx, &c.req)
		if ctx.Err() != nil {
			return nil
		}
		if con.outStyle.terminal && c.output == "text" {
			if err := c.redraw(con, answer, err, time.Since(start)); err != nil {
				return err
			}
		} else {
			line := ""
			if err != nil {
				line = askError(c.stage.address, err).Error()
			} else {
				line = oneLine(answer)
			}
			if line != last {
				last = line
				if err := c.printChange(con, answer, line); err != nil {
					return err
				}
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// redraw puts the table in the place of the last one, in one write, so that it does not
// flicker.
func (c *queryConfig) redraw(con *console, answer *pb.MatchResponse, err error, took time.Duration) error {
	var buf bytes.Buffer
	page := *con
	page.out = &buf
	buf.WriteString("\x1b[H\x1b[J" + con.outStyle.faint(fmt.Sprintf("every %v: %s, %s", c.watch, c.req.Model, time.Now().Format(time.TimeOnly))) + "\n")
	if err != nil {
		fmt.Fprintln(&buf, con.outStyle.red(askError(c.stage.address, err).Error()))
	} else if err := printMatch(&page, answer, c.req.TopK > 0, took); err != nil {
		return err
	}
	_, err = con.out.Write(buf.Bytes())
	return err
}

// printChange prints what the answer is now; line says it for people.
func (c *queryConfig) printChange(con *console, answer *pb.MatchResponse, line string) (err error) {
	if c.output == "json" {
		_, err = fmt.Fprintf(con.out, "%s\n", query.AppendJSON(nil, answer)) // an error is an empty one that says so
	} else {
		_, err = fmt.Fprintf(con.out, "%s %s\n", time.Now().Format(time.TimeOnly), line)
	}
	return err
}

// oneLine says an answer without what always changes: ages, offsets, and the order.
func oneLine(a *pb.MatchResponse) string {
	sortMatches(a.Matches)
	parts := make([]string, 0, len(a.Matches))
	for _, m := range a.Matches {
		depths := cumulative(m)
		s := fmt.Sprintf("%s/%d %d", m.Worker, m.DpRank, depths[0])
		for t, d := range depths[1:] {
			if d > depths[t] {
				s += fmt.Sprintf(" %s %d", tierColumns[t], d)
			}
		}
		if m.Incomplete {
			s += " incomplete"
		}
		parts = append(parts, s)
	}
	if len(parts) == 0 {
		parts = append(parts, "nobody holds any")
	}
	line := fmt.Sprintf("%d blocks: %s", a.Blocks, strings.Join(parts, ", "))
	if a.Partial {
		line += "; partial: " + strings.Join(a.Missing, "; ")
	}
	for _, b := range a.Behind {
		line += fmt.Sprintf("; partition %d is behind", b.Partition)
	}
	return line
}
