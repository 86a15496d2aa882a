// This file is the command query.

package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvindex/index"
	"kvindex/pipeline/query"
	pb "kvindex/pipeline/query/kvindexpb"
)

// queryConfig is what the command is told.
type queryConfig struct {
	stage      stageAccess
	timeout    time.Duration
	tokens     string
	tokensFile string
	locals     string
	req        pb.MatchRequest
	blockSize  uint32
	minOffsets []string
	watch      time.Duration
	output     string
}

func queryCommand() command {
	var c queryConfig
	return command{
		use:   "query",
		short: "Ask which workers hold how much of a prompt",
		long: `Query asks a stage how many leading blocks of a prompt each worker holds. The prompt is
given by its tokens or by the local hashes of its blocks: numbers separated by commas or
white space. An incomplete last block does not count. To turn text into tokens, use the
model's own tokenizer; the last example uses Hugging Face's, in Python.

With --watch it asks again and again until it is interrupted: on a terminal it redraws the
table, elsewhere it prints a line whenever the answer has changed.`,
		example: `  kvindex query --model llama --tokens 1,2,3,4
  kvindex query --model llama --tokens-file prompt.txt --top-k 3 --output json
  kvindex query --model llama --local-hashes 14643705804678351452,16777012769546811212
  kvindex query --model llama --tokens 1,2,3,4 --watch 500ms
  python -c 'import sys, tokenizers as t; print(t.Tokenizer.from_file("tokenizer.json").encode(sys.stdin.read()).ids)' \
      < prompt.txt | kvindex query --model llama --tokens-file -`,
		flags: func(fs *pflag.FlagSet) {
			c.stage.flags(fs)
			timeoutFlag(fs, &c.timeout, 5*time.Second, "give up after this `time`")
			fs.StringVar(&c.req.Model, "model", defaultModel, "`name` of the model")
			fs.Uint32Var(&c.blockSize, "block-size", 0, "`tokens` a block; may be 0 if the model has only one block size")
			fs.StringVar(&c.tokens, "tokens", "", "the prompt's `tokens`")
			fs.StringVar(&c.tokensFile, "tokens-file", "", "read the tokens from this `file`; - is standard input")
			fs.StringVar(&c.locals, "local-hashes", "", "the local `hashes` of the prompt's blocks, instead of tokens")
			fs.StringVar(&c.req.Lora, "lora", "", "`name` of the LoRA adapter")
			fs.StringVar(&c.req.Salt, "salt", "", "cache `salt`")
			fs.StringSliceVar(&c.req.Workers, "workers-only", nil, "answer only the workers with these `names`")
			fs.Uint32Var(&c.req.TopK, "top-k", 0, "answer only the `k` deepest; 0: all")
			fs.Uint32Var(&c.req.MinDepthBlocks, "min-depth", 0, "answer only workers that hold at least this many leading `blocks` in any tier")
			fs.StringVar(&c.req.Hasher, "hasher", "", "hash `scheme` of the model: flash, dynamo or opaque; may be empty if it has only one")
			fs.StringSliceVar(&c.minOffsets, "min-offsets", nil, "wait until the records at `partition=offset,...` are in the answer")
			fs.BoolVar(&c.req.AllowPartial, "allow-partial", false, "answer even if partitions are missing")
			fs.BoolVar(&c.req.FailOpen, "fail-open", false, "answer even if partitions are missing or the records of --min-offsets do not arrive in time")
			fs.DurationVar(&c.watch, "watch", 0, "ask again every `time`; 0: once")
			outputFlag(fs, &c.output)
		},
		run: func(ctx context.Context, con *console, _ []string) error { return c.run(ctx, con) },
	}
}

func (c *queryConfig) run(ctx context.Context, con *console) error {
	given := 0
	for _, s := range []string{c.tokens, c.tokensFile, c.locals} {
		if s != "" {
			given++
		}
	}
	if given != 1 {
		return usagef("give one of --tokens, --tokens-file and --local-hashes")
	}
	var err error
	switch {
	case c.locals != "":
		c.req.LocalHashes, err = numbers(strings.NewReader(c.locals), 64, func(v uint64) uint64 { return v })
	case c.tokens != "":
		c.req.Tokens, err = numbers(strings.NewReader(c.tokens), 32, func(v uint64) uint32 { return uint32(v) })
	default:
		in := con.in
		if c.tokensFile != "-" {
			f, err := os.Open(c.tokensFile)
			if err != nil {
				return usageError{err}
			}
			defer f.Close()
			in = f
		}
		c.req.Tokens, err = numbers(in, 32, func(v uint64) uint32 { return uint32(v) })
	}
	if err != nil {
		return usageError{err}
	}
	c.req.BlockSize = c.blockSize
	if c.req.MinOffsets, err = offsets(c.minOffsets); err != nil {
		return usageError{err}
	}
	cl, err := c.stage.dial(c.timeout)
	if err != nil {
		return err
	}
	defer cl.Close()
	if c.watch > 0 {
		return c.watchMatch(ctx, con, cl)
	}
	start := time.Now()
	answer, err := cl.Match(ctx, &c.req)
	if err != nil {
		return askError(c.stage.address, err)
	}
	if c.output == "json" {
		_, err = fmt.Fprintf(con.out, "%s\n", query.AppendJSON(nil, answer))
		return err
	}
	return printMatch(con, answer, c.req.TopK > 0, time.Since(start))
}

// offsets reads partition=offset of each.
func offsets(list []string) (map[int32]int64, error) {
	out := map[int32]int64{}
	for _, s := range list {
		p, offset, _ := strings.Cut(s, "=")
		n, err := strconv.ParseInt(p, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("min-offsets: %q: want partition=offset", s)
		}
		if out[int32(n)], err = strconv.ParseInt(offset, 10, 64); err != nil {
			return nil, fmt.Errorf("min-offsets: %q: want partition=offset", s)
		}
	}
	return out, nil
}

// numbers reads numbers of that many bits, separated by commas and white space.
func numbers[T any](r io.Reader, bits int, conv func(uint64) T) ([]T, error) {
	var out []T
	sc := bufio.NewScanner(r)
	sc.Split(splitNumbers)
	for sc.Scan() {
		v, err := strconv.ParseUint(sc.Text(), 10, bits)
		if err != nil {
			return nil, fmt.Errorf("number %d: %q: %w", len(out)+1, sc.Text(), errors.Unwrap(err))
		}
		out = append(out, conv(v))
	}
	return out, sc.Err()
}

// splitNumbers is bufio.ScanWords for which a comma, and a list's brackets, are
// white space.
func splitNumbers(data []byte, atEOF bool) (int, []byte, error) {
	between := func(b byte) bool { return strings.IndexByte(" \t\r\n,[]", b) >= 0 }
	start := 0
	for start < len(data) && between(data[start]) {
		start++
	}
	for i := start; i < len(data); i++ {
		if between(data[i]) {
			return i + 1, data[start:i], nil
		}
	}
	if atEOF && start < len(data) {
		return len(data), data[start:], nil
	}
	return start, nil, nil
}

func printMatch(con *console, a *pb.MatchResponse, ordered bool, took time.Duration) error {
	hold := "workers hold"
	if len(a.Matches) == 1 {
		hold = "worker holds"
	}
	fmt.Fprintf(con.out, "%d blocks of %d tokens, %d %s some (%v)\n", a.Blocks, a.BlockSize, len(a.Matches), hold, took.Round(10*time.Microsecond))
	if a.Partial {
		fmt.Fprintln(con.out, con.outStyle.yellow("partial: ")+strings.Join(a.Missing, "; "))
	}
	for _, b := range a.Behind {
		fmt.Fprintf(con.out, "%s partition %d by %s offsets\n", con.outStyle.yellow("behind:"), b.Partition, thousands(b.Offsets))
	}
	if len(a.Matches) == 0 {
		return nil
	}
	if !ordered {
		sortMatches(a.Matches)
	}
	// A column for each lower tier that adds something.
	var tiers []int
	head := []string{"worker", "rank", "blocks", "tokens"}
	for t := range tierColumns {
		adds := func(m *pb.WorkerMatch) bool { return cumulative(m)[t+1] > cumulative(m)[t] }
		if slices.ContainsFunc(a.Matches, adds) {
			tiers = append(tiers, t+1)
			head = append(head, tierColumns[t])
		}
	}
	var rows [][]string
	for _, m := range a.Matches {
		row := []string{m.Worker, fmt.Sprint(m.DpRank), fmt.Sprint(m.DepthBlocks), fmt.Sprint(m.DepthTokens)}
		for _, t := range tiers {
			row = append(row, fmt.Sprint(cumulative(m)[t]))
		}
		note := ""
		if m.Incomplete {
			note = "incomplete"
		}
		rows = append(rows, append(row, milliseconds(m.AgeMs).String(), note))
	}
	fmt.Fprintln(con.out)
	return table(con.out, append(head, "heard", ""), rows)
}

// sortMatches puts the deepest first.
func sortMatches(ms []*pb.WorkerMatch) {
	slices.SortFunc(ms, func(x, y *pb.WorkerMatch) int {
		for t, d := range cumulative(y) {
			if c := d - cumulative(x)[t]; c != 0 {
				return c
			}
		}
		return cmp.Or(strings.Compare(x.Worker, y.Worker), cmp.Compare(x.DpRank, y.DpRank))
	})
}

// tierColumns head the columns of blocks held in the device tier or in those up to a
// lower one.
var tierColumns = [index.Tiers - 1]string{"+host", "+disk", "+external"}

// cumulative returns a match's depths in blocks: device, device or host, and so on.
func cumulative(m *pb.WorkerMatch) index.Depths {
	return index.Depths{int(m.DepthBlocks), int(m.DepthHostBlocks), int(m.DepthDiskBlocks), int(m.DepthExternalBlocks)}
}
