// Sends intents, all at once, with the Go code of docs/clients.md, and prints what came of each.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"guide/intent"
)

type order struct {
	URL      string            `json:"url"`
	Key      string            `json:"key"`
	Body     string            `json:"body"`
	Headers  map[string]string `json:"headers"`
	Patience int64             `json:"patience_ms"`
	Timeout  int64             `json:"timeout_ms"`
	Resent   bool              `json:"resent"`
}

func main() {
	var orders []order
	if err := json.Unmarshal([]byte(os.Args[1]), &orders); err != nil {
		panic(err)
	}
	outcomes := make([]map[string]any, len(orders))
	var all sync.WaitGroup
	for at, one := range orders {
		all.Add(1)
		go func(at int, order order) {
			defer all.Done()
			outcomes[at] = outcome(order)
		}(at, one)
	}
	all.Wait()
	if err := json.NewEncoder(os.Stdout).Encode(outcomes); err != nil {
		panic(err)
	}
}

func outcome(order order) map[string]any {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(order.Patience)*time.Millisecond)
	defer cancel()
	client := &http.Client{Timeout: time.Duration(order.Timeout) * time.Millisecond}
	header := http.Header{}
	for name, value := range order.Headers {
		header.Set(name, value)
	}
	answer, err := intent.Send(ctx, client, order.URL, order.Key, []byte(order.Body), header, order.Resent)
	switch {
	case err == nil:
		replayed := answer.Header.Get("Idempotent-Replayed") == "true"
		return map[string]any{"answer": answer.Status, "content": string(answer.Content), "replayed": replayed}
	case errors.Is(err, intent.ErrRejected):
		return map[string]any{"rejected": why(err)}
	case errors.Is(err, intent.ErrUnsettled):
		return map[string]any{"unsettled": why(err)}
	default:
		panic(err)
	}
}

func why(err error) string {
	_, why, _ := strings.Cut(err.Error(), ": ")
	return why
}
