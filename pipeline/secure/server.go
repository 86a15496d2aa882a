// This file is the TLS of the query ports.

package secure

import (
	"crypto/tls"
	"errors"
	"fmt"
)

// Server is the TLS of a port that is listened on. The zero value is plaintext.
type Server struct {
	CertFile     string // PEM, with its chain; with KeyFile
	KeyFile      string
	ClientCAFile string // PEM; clients must show a certificate of one of these authorities
}

// On reports whether there is TLS.
func (s *Server) On() bool { return s.CertFile != "" }

// Validate says all that is wrong, each with its name as a flag, and reads every
// file once.
func (s *Server) Validate() error {
	if (s.CertFile == "") != (s.KeyFile == "") {
		return errors.New("tls-cert-file and tls-key-file: give both or none")
	}
	if s.CertFile == "" {
		if s.ClientCAFile != "" {
			return errors.New("tls-client-ca-file: given without tls-cert-file")
		}
		return nil
	}
	var errs []error
	if _, err := keyPair(s.CertFile, s.KeyFile, nil).get(); err != nil {
		errs = append(errs, fmt.Errorf("tls-cert-file: %w", err))
	}
	if s.ClientCAFile != "" {
		if _, err := authorities(s.ClientCAFile, nil).get(); err != nil {
			errs = append(errs, fmt.Errorf("tls-client-ca-file: %w", err))
		}
	}
	return errors.Join(errs...)
}

// Config is for a listener. Each handshake uses what the files say then; failed
// is told why they cannot be used, once a change. required is whether a client
// without certificate fails in the handshake, if there are authorities; else
// the caller looks at what it has shown.
func (s *Server) Config(required bool, failed func(error)) *tls.Config {
	pair := keyPair(s.CertFile, s.KeyFile, failed)
	var ca = authorities(s.ClientCAFile, failed)
	// A session that is resumed would bring back a certificate that was
	// checked against authorities of then; connections are few and long.
	base := &tls.Config{MinVersion: tls.VersionTLS12, SessionTicketsDisabled: true}
	listen := base.Clone()
	listen.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		now := base.Clone()
		cert, err := pair.get()
		if err != nil {
			return nil, err
		}
		now.Certificates = []tls.Certificate{cert}
		if s.ClientCAFile != "" {
			if now.ClientCAs, err = ca.get(); err != nil {
				return nil, err
			}
			now.ClientAuth = tls.VerifyClientCertIfGiven
			if required {
				now.ClientAuth = tls.RequireAndVerifyClientCert
			}
		}
		return now, nil
	}
	return listen
}
