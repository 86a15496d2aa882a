// This file reads a match request from JSON: strictly, for a field or a digit
// lost in silence is a wrong answer.

package query

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"mime"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvindex/pipeline/query/kvindexpb"
)

// matchJSON is MatchRequest with the .proto file's names.
type matchJSON struct {
	Model        string          `json:"model"`
	BlockSize    uint32          `json:"block_size"`
	Tokens       tokensJSON      `json:"tokens"`
	LocalHashes  hashesJSON      `json:"local_hashes"`
	LoRA         string          `json:"lora"`
	Salt         string          `json:"salt"`
	MM           json.RawMessage `json:"mm"`
	Workers      []string        `json:"workers"`
	TopK         uint32          `json:"top_k"`
	EarlyExit    bool            `json:"early_exit"`
	AllowPartial bool            `json:"allow_partial"`
	Hasher       string          `json:"hasher"`
	MinDepth     uint32          `json:"min_depth_blocks"`
	MinOffsets   offsetsJSON     `json:"min_offsets"`
	FailOpen     bool            `json:"fail_open"`
	TimeoutMs    uint32          `json:"timeout_ms"`
}

// matchManyJSON is MatchManyRequest.
type matchManyJSON struct {
	Requests   json.RawMessage `json:"requests"`
	MinOffsets offsetsJSON     `json:"min_offsets"`
	TimeoutMs  uint32          `json:"timeout_ms"`
}

type multimodal struct {
	Hash       hashJSON `json:"hash"`
	ID         string   `json:"id"`
	FirstToken uint32   `json:"first_token"`
	Tokens     uint32   `json:"tokens"`
}

// readBody fills scratch.in with a request's body, which must be JSON by its type,
// unless it is known to be MessagePack, and within the limit.
func (s *Server) readBody(w http.ResponseWriter, r *http.Request, scratch *httpScratch) error {
	if t := r.Header.Get("Content-Type"); t != "" && t != "application/json" && !scratch.packed {
		if media, _, err := mime.ParseMediaType(t); err != nil || media != "application/json" {
			return &httpError{http.StatusUnsupportedMediaType, "UNSUPPORTED_MEDIA_TYPE",
				fmt.Sprintf("Content-Type is %q: want application/json", t)}
		}
	}
	if e := r.Header.Get("Content-Encoding"); e != "" && e != "identity" {
		return &httpError{http.StatusUnsupportedMediaType, "UNSUPPORTED_MEDIA_TYPE",
			fmt.Sprintf("Content-Encoding is %q: send the body as it is", e)}
	}
	if r.ContentLength > int64(s.limits.MaxRequestBytes) { // nothing of it is read
		w.Header().Set("Connection", "close")
		return s.tooLarge()
	}
	scratch.in.Reset()
	if _, err := scratch.in.ReadFrom(http.MaxBytesReader(w, r.Body, int64(s.limits.MaxRequestBytes))); err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return s.tooLarge()
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err := &httpError{http.StatusRequestTimeout, "REQUEST_TIMEOUT", "the body did not arrive in time"}
			s.refuse(overHTTP, slowSender, r.RemoteAddr, err)
			return err
		}
		return invalid("reading the body: %v", err)
	}
	return nil
}

func (s *Server) tooLarge() error {
	return status.Errorf(codes.ResourceExhausted, "the body is above the limit of %d bytes", s.limits.MaxRequestBytes)
}

// parseMatchMany reads a batch; nothing of body is kept. What limits are for is counted
// before it is made: an element is three bytes of a body and hundreds in memory.
func parseMatchMany(body []byte, limits Limits) (*pb.MatchManyRequest, error) {
	if !exactText(body) {
		return nil, errNotUTF8
	}
	var in matchManyJSON
	if err := decodeJSON(body, &in); err != nil {
		return nil, err
	}
	if err := checkNames(body, matchManyNames); err != nil {
		return nil, err
	}
	if n := elements(in.Requests); n > limits.MaxBatch {
		return nil, tooMany("requests", n, "requests", limits.MaxBatch)
	}
	var list struct {
		Requests []json.RawMessage `json:"requests"`
	}
	if err := decodeField("requests", in.Requests, &list); err != nil {
		return nil, err
	}
	batch := &pb.MatchManyRequest{MinOffsets: in.MinOffsets, TimeoutMs: in.TimeoutMs}
	for i, raw := range list.Requests {
		if raw[0] != '{' {
			return nil, invalid("requests[%d]: %s is not an object", i, clip(raw))
		}
		req, err := parseOne(raw, limits)
		if err != nil {
			return nil, invalid("requests[%d]: %s", i, status.Convert(err).Message())
		}
		batch.Requests = append(batch.Requests, req)
	}
	return batch, nil
}

var errNotUTF8 = invalid("the body is not UTF-8, or has half a character in an escape") // encoding/json would put other characters in their place

// exactText reports whether a body is UTF-8 and has no escape of half a character in it.
func exactText(body []byte) bool {
	if !utf8.Valid(body) {
		return false
	}
	for at := body; ; {
		i := bytes.IndexByte(at, '\\')
		if i < 0 || len(at) < i+2 {
			return true
		}
		if at = at[i:]; at[1] != 'u' || len(at) < 6 {
			at = at[2:]
			continue
		}
		first := escaped(at)
		at = at[6:]
		if !utf16.IsSurrogate(first) {
			continue
		}
		if len(at) < 6 || at[0] != '\\' || at[1] != 'u' || utf16.DecodeRune(first, escaped(at)) == utf8.RuneError {
			return false
		}
		at = at[6:]
	}
}

// escaped reads four hexadecimal digits after \u; what is none is not JSON either.
func escaped(at []byte) rune {
	v, err := strconv.ParseUint(string(at[2:6]), 16, 16)
	if err != nil {
		return 0
	}
	return rune(v)
}

// parseMatch is parseMatchMany of one request.
func parseMatch(body []byte, limits Limits) (*pb.MatchRequest, error) {
	if !exactText(body) {
		return nil, errNotUTF8
	}
	return parseOne(body, limits)
}

// parseOne reads one request's object.
func parseOne(body []byte, limits Limits) (*pb.MatchRequest, error) {
	var in matchJSON
	body, err := in.lift(body)
	if err != nil {
		return nil, invalid("%v", err)
	}
	return in.parse(body, limits)
}

// parse reads what lift left.
func (in *matchJSON) parse(body []byte, limits Limits) (*pb.MatchRequest, error) {
	if err := decodeJSON(body, in); err != nil {
		return nil, err
	}
	if err := checkNames(body, matchNames); err != nil {
		return nil, err
	}
	req := &pb.MatchRequest{
		Model:          in.Model,
		BlockSize:      in.BlockSize,
		Tokens:         in.Tokens,
		LocalHashes:    in.LocalHashes,
		Lora:           in.LoRA,
		Salt:           in.Salt,
		Workers:        in.Workers,
		TopK:           in.TopK,
		EarlyExit:      in.EarlyExit,
		AllowPartial:   in.AllowPartial,
		Hasher:         in.Hasher,
		MinDepthBlocks: in.MinDepth,
		MinOffsets:     in.MinOffsets,
		FailOpen:       in.FailOpen,
		TimeoutMs:      in.TimeoutMs,
	}
	if n := elements(in.MM); n > limits.MaxMultimodal {
		return nil, tooMany("mm", n, "multimodal entries", limits.MaxMultimodal)
	}
	var list struct {
		MM []multimodal `json:"mm"`
	}
	if err := decodeField("mm", in.MM, &list); err != nil {
		return nil, err
	}
	at := in.MM
	for i, m := range list.MM {
		at = skipSpace(at[1:]) // what is before the element
		if err := checkNames(at, multimodalNames); err != nil {
			return nil, invalid("mm[%d]: %s", i, status.Convert(err).Message())
		}
		at = skipValue(at)
		req.Mm = append(req.Mm, &pb.Multimodal{Hash: uint64(m.Hash), Id: m.ID, FirstToken: m.FirstToken, Tokens: m.Tokens})
	}
	return req, nil
}

// elements counts those of a valid list; what is none has none.
func elements(list json.RawMessage) (n int) {
	if len(list) == 0 || list[0] != '[' {
		return 0
	}
	for at := skipSpace(list[1:]); len(at) > 0 && at[0] != ']'; n++ {
		at = bytes.TrimPrefix(skipValue(at), comma)
	}
	return n
}

// decodeField reads a field's value into the object v that has this field alone, so
// that errors name it.
func decodeField(name string, value json.RawMessage, v any) error {
	if value == nil {
		return nil
	}
	return decodeJSON(slices.Concat([]byte(`{"`+name+`":`), value, []byte(`}`)), v)
}

// decodeJSON reads one object and nothing else, with no field that is not v's.
func decodeJSON(body []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return jsonError(err)
	}
	if _, err := d.Token(); err != io.EOF {
		return invalid("the body goes on after its JSON object")
	}
	return nil
}

// jsonError says what is wrong in the caller's words rather than Go's.
func jsonError(err error) error {
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		field := e.Field
		if field == "" {
			field = "the body"
		}
		return invalid("%s: %s is not a %s", field, e.Value, e.Type.Kind())
	}
	if _, ok := errors.AsType[*json.SyntaxError](err); ok {
		return invalid("not JSON: %v", err)
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return invalid("the body ends before its JSON object does")
	}
	return invalid("%s", strings.TrimPrefix(err.Error(), "json: "))
}

// lift reads the lists of numbers at the top of the object, which are nearly
// all of it, and returns the body with null in their places for encoding/json,
// which is ten times slower at them. What it does not understand it leaves
// there: encoding/json finds the same lists, or what is wrong.
func (in *matchJSON) lift(body []byte) ([]byte, error) {
	var rest []byte
	left := body // not yet in rest
	at := skipSpace(body)
	if len(at) == 0 || at[0] != '{' {
		return body, nil
	}
	for at = skipSpace(at[1:]); len(at) > 0 && at[0] == '"'; at = skipSpace(at[1:]) {
		end := bytes.IndexByte(at[1:], '"') + 1
		if end == 0 || bytes.IndexByte(at[:end], '\\') >= 0 {
			break
		}
		key := at[1:end]
		at = skipSpace(at[end+1:])
		if len(at) == 0 || at[0] != ':' {
			break
		}
		value := skipSpace(at[1:])
		isList := len(value) > 0 && value[0] == '['
		var err error
		switch {
		case isList && string(key) == "tokens":
			in.Tokens, at, err = parseUints(in.Tokens, "tokens", value, math.MaxUint32, false)
		case isList && string(key) == "local_hashes":
			in.LocalHashes, at, err = parseUints(in.LocalHashes, "local_hashes", value, math.MaxUint64, false)
		default:
			isList = false
			at = skipValue(value)
		}
		if err != nil {
			return nil, err
		}
		if isList {
			rest = append(rest, left[:len(left)-len(value)]...)
			rest = append(rest, "null"...)
			left = at
		}
		at = skipSpace(at)
		if len(at) == 0 || at[0] != ',' {
			break
		}
	}
	if rest == nil {
		return body, nil
	}
	return append(rest, left...), nil
}

// skipValue returns what follows the JSON value at the front of b.
func skipValue(b []byte) []byte {
	depth, quoted := 0, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '[' || c == '{':
			depth++
		case depth > 0 && (c == ']' || c == '}'):
			depth--
		case depth == 0 && (c == ',' || c == '}' || c == ']'):
			return b[i:]
		}
	}
	return nil
}

// The lists of numbers are read by hand: quickly, and exactly, since no number
// becomes a float64 on the way. Each may be a number or a string of decimal
// digits, as JavaScript needs for 64 bits.
type (
	tokensJSON []uint32
	hashesJSON []uint64
	hashJSON   uint64
	// offsetsJSON is an object: offsets by number of the partition.
	offsetsJSON map[int32]int64
)

func (o *offsetsJSON) UnmarshalJSON(data []byte) error {
	if string(data) == "null" {
		return nil
	}
	if data[0] != '{' {
		return fmt.Errorf("min_offsets: %s is not an object", clip(data))
	}
	*o = offsetsJSON{}
	for at := skipSpace(data[1:]); at[0] != '}'; {
		p, rest, ok := parseUint(at, math.MaxInt32) // a key is a string
		if !ok {
			return fmt.Errorf("min_offsets: %s is not the number of a partition", clip(at))
		}
		rest = skipSpace(skipSpace(rest)[1:]) // the colon
		offset, after, ok := parseUint(rest, math.MaxInt64)
		if after = skipSpace(after); !ok || after[0] != ',' && after[0] != '}' {
			return fmt.Errorf("min_offsets: %s is not an offset", clip(rest))
		}
		if _, twice := (*o)[int32(p)]; twice {
			return fmt.Errorf("min_offsets: partition %d is there twice", p)
		}
		(*o)[int32(p)] = int64(offset)
		at = after
		if at[0] == ',' {
			at = skipSpace(at[1:])
		}
	}
	return nil
}

func (t *tokensJSON) UnmarshalJSON(data []byte) (err error) {
	if string(data) != "null" {
		*t, _, err = parseUints(*t, "tokens", data, math.MaxUint32, false)
	}
	return err
}

func (h *hashesJSON) UnmarshalJSON(data []byte) (err error) {
	if string(data) != "null" {
		*h, _, err = parseUints(*h, "local_hashes", data, math.MaxUint64, false)
	}
	return err
}

func (h *hashJSON) UnmarshalJSON(data []byte) error {
	if string(data) == "null" {
		return nil
	}
	v, rest, ok := parseUint(data, math.MaxUint64)
	if !ok || len(rest) > 0 {
		return fmt.Errorf("mm: hash %s is not a whole number of 64 bits", clip(data))
	}
	*h = hashJSON(v)
	return nil
}

// parseUints reads the array at the front of data and returns what follows it.
// No element may be above most; if signed, it may also be a negative number of 64
// bits, which is read as the same bits. have is what was read of the field before.
func parseUints[T uint32 | uint64](have []T, field string, data []byte, most uint64, signed bool) (list []T, rest []byte, err error) {
	if have != nil {
		return nil, nil, fmt.Errorf("%s is there twice", field)
	}
	if data[0] != '[' {
		return nil, nil, fmt.Errorf("%s: %s is not an array", field, clip(data))
	}
	list = make([]T, 0, bytes.Count(data, comma)+1)
	data = skipSpace(data[1:])
	if len(data) > 0 && data[0] == ']' {
		return list, data[1:], nil
	}
	for {
		v, rest, ok := parseUint(data, most)
		if !ok && signed {
			v, rest, ok = parseNegative(data)
		}
		rest = skipSpace(rest)
		if !ok || len(rest) == 0 || (rest[0] != ',' && rest[0] != ']') {
			least := 0
			if signed {
				least = math.MinInt64
			}
			return nil, nil, fmt.Errorf("%s[%d]: %s is not a whole number from %d to %d", field, len(list), clip(data), least, most)
		}
		list = append(list, T(v))
		if rest[0] == ']' {
			return list, rest[1:], nil
		}
		data = skipSpace(rest[1:])
	}
}

var comma = []byte{','}

// parseUint reads the digits at the front of data, bare or within quotes, and
// returns what follows them.
func parseUint(data []byte, most uint64) (v uint64, rest []byte, ok bool) {
	quoted := len(data) > 0 && data[0] == '"'
	if quoted {
		data = data[1:]
	}
	i := 0
	for ; i < len(data) && '0' <= data[i] && data[i] <= '9'; i++ {
		digit := uint64(data[i] - '0')
		if v > most/10 || v == most/10 && digit > most%10 {
			return 0, nil, false
		}
		v = v*10 + digit
	}
	switch {
	case i == 0, i > 1 && data[0] == '0':
		return 0, nil, false
	case !quoted:
		return v, data[i:], true
	case i == len(data) || data[i] != '"':
		return 0, nil, false
	}
	return v, data[i+1:], true
}

// parseNegative reads the negative number at the front of data, bare or within
// quotes, as the bits of an int64.
func parseNegative(data []byte) (v uint64, rest []byte, ok bool) {
	quoted := len(data) > 0 && data[0] == '"'
	if quoted {
		data = data[1:]
	}
	if len(data) < 2 || data[0] != '-' || data[1] == '"' {
		return 0, nil, false
	}
	v, rest, ok = parseUint(data[1:], 1<<63)
	if ok && quoted {
		if len(rest) == 0 || rest[0] != '"' {
			return 0, nil, false
		}
		rest = rest[1:]
	}
	return -v, rest, ok
}

func skipSpace(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\n' || b[0] == '\t' || b[0] == '\r') {
		b = b[1:]
	}
	return b
}

// clip shows the value at the front of b, shortened.
func clip(b []byte) string {
	const most = 40
	if i := bytes.IndexAny(b, ",]}\n"); i > 0 {
		b = b[:i]
	}
	if len(b) > most {
		return strings.ToValidUTF8(string(b[:most]), "") + "..."
	}
	return string(b)
}
