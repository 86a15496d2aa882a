// This file shows the metrics.

package query

import (
	"bytes"
	"maps"
	"net/http"
	"strconv"
)

// scraped has the metrics made whole before anything of them is sent, one scrape at a
// time, and counted until they are taken: what makes them would keep all samples as long
// as a reader takes. They have the room that refusals have, so that they are shown although
// queries are refused.
func (s *Server) scraped(metrics http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		page := s.scrape(metrics, r)
		answer, err := s.unread.hold(r.Context().Value(connKey{}).(*doorConn), page.body.Cap(), s.unread.refusals)
		if err != nil {
			s.refusedBusy(overHTTP, err)
			writeError(w, err)
			return
		}
		defer answer.take()
		maps.Copy(w.Header(), page.header)
		w.Header().Set("Content-Length", strconv.Itoa(page.body.Len()))
		w.WriteHeader(page.code)
		w.Write(page.body.Bytes()) // an error here is the client's leaving
	})
}

func (s *Server) scrape(metrics http.Handler, r *http.Request) *page {
	s.scraping.Lock()
	defer s.scraping.Unlock()
	p := &page{header: http.Header{}, code: http.StatusOK}
	metrics.ServeHTTP(p, r)
	return p
}

// page is an HTTP answer that is not sent yet.
type page struct {
	header http.Header
	code   int
	body   bytes.Buffer
}

func (p *page) Header() http.Header         { return p.header }
func (p *page) WriteHeader(code int)        { p.code = code }
func (p *page) Write(b []byte) (int, error) { return p.body.Write(b) }
