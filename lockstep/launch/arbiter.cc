// SPDX-License-Identifier: Apache-2.0
// launch/arbiter.cc: a voter whose memory is a key of etcd: the same for both halves of the machines.
//
// Flow:    arbiter.h -> here -> etcd's JSON gateway (etcd 3.4 and later), over HTTP without TLS
// Owns:    keys lockstep/JOB/DECISION, which etcd removes after a week
// Threads: one
#include "lockstep/launch/arbiter.h"

#include <openssl/evp.h>
#include <poll.h>

#include <algorithm>
#include <array>

#include <nlohmann/json.hpp>

#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"
#include "lockstep/launch/agreement.h"
#include "lockstep/launch/channel.h"

namespace lockstep {
namespace {

using nlohmann::json;

constexpr milliseconds kServerAnswersWithin{2000};
constexpr int kAttempts = 5;
constexpr int kSecondsOfAWeek = 7 * 24 * 3600;

std::string to_base64(const std::string& bytes) {
  std::string text((bytes.size() + 2) / 3 * 4 + 1, '\0');
  const int length =
      ::EVP_EncodeBlock(reinterpret_cast<unsigned char*>(text.data()),
                        reinterpret_cast<const unsigned char*>(bytes.data()), static_cast<int>(bytes.size()));
  text.resize(to_size(length));
  return text;
}

std::string from_base64(const std::string& text) {
  std::string bytes(text.size() / 4 * 3 + 1, '\0');
  const int length =
      ::EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                        reinterpret_cast<const unsigned char*>(text.data()), static_cast<int>(text.size()));
  const std::size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  bytes.resize(length < 0 ? 0 : to_size(length) - padding);
  return bytes;
}

// HTTP/1.0: the answer ends with the connection, and comes in one piece.
std::optional<std::string> post_to(const Endpoint& server, const std::string& path, const std::string& body) {
  const Deadline deadline = Deadline::after(kServerAnswersWithin);
  auto connection = connect_to(look_up(server, deadline).addresses, deadline);
  if (!connection) return std::nullopt;
  Channel channel(std::move(connection->fd));
  std::string request = concat("POST ", path, " HTTP/1.0\r\nHost: ", server.text(),
                               "\r\nContent-Type: application/json\r\nContent-Length: ", body.size(), "\r\n\r\n", body);
  while (!request.empty()) {
    const auto bytes = channel.write(request);
    if (!bytes || !wait_for(POLLOUT, channel.fd(), deadline)) return std::nullopt;
    request.erase(0, *bytes);
  }
  std::string answer;
  std::array<char, 4096> room{};
  while (wait_for(POLLIN, channel.fd(), deadline)) {
    const auto bytes = channel.read(room);
    if (!bytes) break;
    answer.append(room.data(), *bytes);
  }
  const std::size_t head = answer.find("\r\n\r\n");
  const bool good = head != std::string::npos && answer.starts_with("HTTP/1.") && answer.substr(8, 5) == " 200 ";
  return good ? std::optional(answer.substr(head + 4)) : std::nullopt;
}

class EtcdArbiter final : public Arbiter {
 public:
  explicit EtcdArbiter(std::vector<Endpoint> servers) : servers_(std::move(servers)) {}

  // Reads the key, answers as an Acceptor with that memory, and writes it back if nobody else has written meanwhile.
  std::string answer(const std::string& job, const std::string& request) override try {
    const auto words = split(request, ' ');
    if (words.size() < 3) return "";
    const std::string key = to_base64(concat("lockstep/", job, "/", words[1]));
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      const auto found = post("/v3/kv/range", json{{"key", key}}.dump());
      if (!found) return "";
      const json answer = json::parse(*found);
      const bool is_new = !answer.contains("kvs");
      const json entry = is_new ? json{{"mod_revision", "0"}, {"value", ""}} : answer["kvs"].at(0);
      Acceptor voter = Acceptor::parse(from_base64(entry.value("value", "")));
      const std::string word = voter.answer(request);
      if (word.empty() || word.starts_with("higher")) return word;
      json put{{"key", key}, {"value", to_base64(voter.text())}};
      if (is_new) {
        const auto lease = post("/v3/lease/grant", json{{"TTL", kSecondsOfAWeek}}.dump());
        if (!lease) return "";
        put["lease"] = json::parse(*lease).at("ID");
      } else {
        put["ignore_lease"] = true;
      }
      const json unchanged{
          {"key", key}, {"target", "MOD"}, {"result", "EQUAL"}, {"mod_revision", entry.at("mod_revision")}};
      const json swap{{"compare", json::array({unchanged})}, {"success", json::array({json{{"request_put", put}}})}};
      const auto swapped = post("/v3/kv/txn", swap.dump());
      if (!swapped) return "";
      if (json::parse(*swapped).value("succeeded", false)) return word;
    }
    return "";
  } catch (const json::exception&) {
    return "";  // another program answers there
  }

 private:
  // The body of the first answer, of whichever server gives one. Nothing: none does, or not with status 200.
  std::optional<std::string> post(const std::string& path, const std::string& body) const {
    for (const Endpoint& server : servers_)
      if (auto answer = post_to(server, path, body)) return answer;
    return std::nullopt;
  }

  std::vector<Endpoint> servers_;
};

}  // namespace

std::shared_ptr<Arbiter> make_arbiter(const std::string& name) {
  constexpr int kPortOfEtcd = 2379;
  if (name.empty()) return nullptr;
  std::vector<Endpoint> servers;
  if (name.starts_with("etcd:"))
    for (const std::string& text : split(name.substr(5), ',')) {
      const std::size_t colon = std::min(text.rfind(':'), text.size());
      Endpoint server{text.substr(0, colon), kPortOfEtcd};
      if (server.host.empty() || (colon < text.size() && !parse_int(text.substr(colon + 1), server.port))) {
        servers.clear();
        break;
      }
      servers.push_back(std::move(server));
    }
  if (servers.empty()) throw UsageError({.what = concat("--arbiter is '", name, "'"), .next = "give etcd:HOST:PORT"});
  return std::make_shared<EtcdArbiter>(std::move(servers));
}

}  // namespace lockstep
