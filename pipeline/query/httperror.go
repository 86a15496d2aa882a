// This file writes answers over HTTP, and says how gRPC's codes read there.

package query

import (
	"errors"
	"net/http"
	"strconv"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// httpError is an error that only HTTP knows.
type httpError struct {
	status  int
	code    string
	message string
}

func (e *httpError) Error() string { return e.message }

// GRPCStatus is how the error counts in metrics and spans.
func (e *httpError) GRPCStatus() *status.Status {
	return status.New(codes.InvalidArgument, e.message)
}

// httpStatus is the HTTP status of a service's error.
func httpStatus(err error) int {
	if e, ok := errors.AsType[*httpError](err); ok {
		return e.status
	}
	if _, ok := errors.AsType[*busyError](err); ok {
		return http.StatusTooManyRequests
	}
	switch status.Code(err) {
	case codes.OK:
		return http.StatusOK
	case codes.InvalidArgument:
		return http.StatusBadRequest
	case codes.Unauthenticated:
		return http.StatusUnauthorized
	case codes.NotFound:
		return http.StatusNotFound
	case codes.FailedPrecondition:
		return http.StatusConflict
	case codes.ResourceExhausted:
		return http.StatusRequestEntityTooLarge
	case codes.Unimplemented:
		return http.StatusNotImplemented
	case codes.Unavailable:
		return http.StatusServiceUnavailable
	case codes.DeadlineExceeded:
		return http.StatusGatewayTimeout
	case codes.Canceled:
		return 499 // nobody reads it; proxies' name for a client that left
	}
	return http.StatusInternalServerError
}

// writeError answers {"error":{"code":...,"message":...}}, or as a dropinError is
// written.
func writeError(w http.ResponseWriter, err error) {
	flat, isFlat := errors.AsType[*dropinError](err)
	if isFlat {
		err = flat.err
	}
	st := status.Convert(err)
	code, message := codeName(st.Code()), st.Message()
	if e, ok := errors.AsType[*httpError](err); ok {
		code = e.code
	}
	httpCode := httpStatus(err)
	switch httpCode {
	case http.StatusServiceUnavailable, http.StatusTooManyRequests:
		w.Header().Set("Retry-After", "1")
	case http.StatusUnauthorized:
		w.Header().Set("WWW-Authenticate", `Bearer realm="kvindex"`)
	}
	if isFlat && flat.packed {
		why, _ := errors.AsType[*packedRefusal](err)
		writePacked(w, httpCode, appendPackedError(nil, message, code, why))
		return
	}
	if isFlat {
		body := appendString([]byte(`{"error":`), message)
		body = append(append(body, `,"code":"`...), code...)
		writeJSON(w, httpCode, append(body, `"}`...))
		return
	}
	body := append([]byte(`{"error":{"code":"`), code...)
	body = append(body, `","message":`...)
	body = appendString(body, message)
	writeJSON(w, httpCode, append(body, "}}"...))
}

func writeJSON(w http.ResponseWriter, status int, body []byte) {
	writeBody(w, status, jsonType, body, newline) // for the terminal's sake
}

func writePacked(w http.ResponseWriter, status int, body []byte) {
	writeBody(w, status, packedType, body, nil)
}

func writeBody(w http.ResponseWriter, status int, media []string, body, end []byte) {
	h := w.Header()
	h["Content-Type"] = media
	h["Content-Length"] = []string{strconv.Itoa(len(body) + len(end))}
	h["Cache-Control"] = noStore
	w.WriteHeader(status)
	w.Write(body)
	w.Write(end) // an error here is the client's leaving
}

var (
	jsonType   = []string{"application/json"}
	packedType = []string{packedMedia}
	noStore    = []string{"no-store"}
	newline    = []byte{'\n'}
)
