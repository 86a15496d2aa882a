// This file knows the bearer tokens that callers may show.

package secure

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"strings"
	"time"
)

const (
	minTokenBytes = 16
	maxTokenBytes = 4096
	maxTokens     = 1000
	// tokensEvery is how old what is known of the tokens' file may be.
	tokensEvery = time.Second
)

// What Check refuses with; an expired token is an *ExpiredError.
var (
	ErrNoToken      = errors.New("no bearer token: this instance wants the header Authorization: Bearer TOKEN")
	ErrUnknownToken = errors.New("the bearer token is not known")
)

// ExpiredError says that a token was good until At.
type ExpiredError struct{ At time.Time }

func (e *ExpiredError) Error() string {
	return "the bearer token expired at " + e.At.Format(time.RFC3339)
}

// Tokens are those that let a caller in, from a file with one a line:
//
//	TOKEN [EXPIRES]
//
// EXPIRES is a time as RFC 3339 writes it, 2027-01-31T00:00:00Z; without one the
// token is good until it is taken out. Empty lines and lines that begin with #
// are left out. The file is read again within a second of its change.
type Tokens struct{ file *watched[[]token] }

type token struct {
	sum     [sha256.Size]byte
	expires time.Time // zero: never
}

// NewTokens reads the file. failed is told, once a change, why what it says later
// cannot be used; the tokens of before then stay.
func NewTokens(file string, failed func(error)) (*Tokens, error) {
	t := &Tokens{&watched[[]token]{
		paths: []string{file},
		parse: func(c [][]byte) ([]token, error) {
			list, err := parseTokens(c[0])
			if err != nil {
				err = fmt.Errorf("%s: %w", file, err)
			}
			return list, err
		},
		every:  tokensEvery,
		failed: failed,
	}}
	_, err := t.file.get()
	return t, err
}

// parseTokens never puts a token into an error: that is for the log.
func parseTokens(text []byte) ([]token, error) {
	var list []token
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		fields := strings.Fields(lines.Text())
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		if len(fields) > 2 {
			return nil, fmt.Errorf("line %d: want a token and, if it expires, when", n)
		}
		if l := len(fields[0]); l < minTokenBytes || l > maxTokenBytes {
			return nil, fmt.Errorf("line %d: the token has %d bytes, want %d to %d", n, l, minTokenBytes, maxTokenBytes)
		}
		t := token{sum: sha256.Sum256([]byte(fields[0]))}
		if len(fields) == 2 {
			var err error
			if t.expires, err = time.Parse(time.RFC3339, fields[1]); err != nil {
				return nil, fmt.Errorf("line %d: after the token: want a time such as 2027-01-31T00:00:00Z", n)
			}
		}
		if list = append(list, t); len(list) > maxTokens {
			return nil, fmt.Errorf("more than %d tokens", maxTokens)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(list) == 0 {
		return nil, errors.New("no token in it")
	}
	return list, nil
}

// Check looks at the value of a request's Authorization header. Its time does not
// depend on how much of a token is right. It is safe for concurrent use.
func (t *Tokens) Check(header string) error {
	scheme, shown, ok := strings.Cut(header, " ")
	if !ok || !strings.EqualFold(scheme, "bearer") {
		return ErrNoToken
	}
	shown = strings.TrimSpace(shown)
	if len(shown) > maxTokenBytes {
		return ErrUnknownToken
	}
	list, err := t.file.get()
	if err != nil {
		return err
	}
	sum := sha256.Sum256([]byte(shown))
	found := -1
	for i := range list {
		if subtle.ConstantTimeCompare(sum[:], list[i].sum[:]) == 1 {
			found = i
		}
	}
	switch {
	case found < 0:
		return ErrUnknownToken
	case !list[found].expires.IsZero() && !time.Now().Before(list[found].expires):
		return &ExpiredError{list[found].expires}
	}
	return nil
}
