// SPDX-License-Identifier: Apache-2.0

#include "program.h"

#include <algorithm>
#include <cctype>
#include <iterator>

#include "op.h"

namespace nemo {

size_t Sizes::place(const std::string& name) {
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found != names_.end()) return static_cast<size_t>(found - names_.begin());
  names_.push_back(name);
  return names_.size() - 1;
}

size_t Sizes::known(const std::string& name) const {
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found == names_.end()) throw Invalid("no input's shape has the size `" + name + "`");
  return static_cast<size_t>(found - names_.begin());
}

namespace {

bool is_name(const std::string& word) {
  return !word.empty() && (std::isalpha(static_cast<unsigned char>(word[0])) || word[0] == '_');
}

int64_t read_number(const std::string& word) {
  const bool digits = !word.empty() && word.size() < 18 && std::all_of(word.begin(), word.end(), [](unsigned char c) {
    return std::isdigit(c) != 0;
  });
  if (!digits) throw Invalid("`" + word + "` is no number, name or operator");
  return std::stoll(word);
}

int64_t apply(char kind, int64_t a, int64_t b) {
  switch (kind) {
    case '+':
      return a + b;
    case '-':
      return a - b;
    case '*':
      return a * b;
    default:
      require(b > 0, "a size is divided by something that is not positive");
      return a >= 0 ? a / b : -((-a + b - 1) / b);
  }
}

}  // namespace

Expression::Expression(const std::string& text, Sizes& sizes, bool binds) {
  const std::vector<std::string> words = split(text, ' ');
  size_t depth = 0;
  for (const std::string& word : words) {
    if (word == "+" || word == "-" || word == "*" || word == "//") {
      if (depth < 2) throw Invalid("an operator lacks operands in `" + text + "`");
      words_.push_back({word[0], 0});
      --depth;
      continue;
    }
    if (is_name(word)) {
      const size_t place = binds && words.size() == 1 ? sizes.place(word) : sizes.known(word);
      words_.push_back({'s', static_cast<int64_t>(place)});
      if (words.size() == 1) lone_ = static_cast<int>(place);
    } else {
      words_.push_back({'n', read_number(word)});
    }
    ++depth;
  }
  if (depth != 1) throw Invalid("`" + text + "` is not one expression");
}

int64_t Expression::value(const std::vector<int64_t>& values) const {
  int64_t stack[16];
  size_t depth = 0;
  for (const Word& word : words_) {
    if (word.kind == 'n' || word.kind == 's') {
      require(depth < std::size(stack), "an expression is too deep");
      stack[depth++] = word.kind == 'n' ? word.number : values[static_cast<size_t>(word.number)];
    } else {
      --depth;
      stack[depth - 1] = apply(word.kind, stack[depth - 1], stack[depth]);
    }
  }
  return stack[0];
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t start = 0;
  for (size_t end; (end = text.find(separator, start)) != std::string::npos; start = end + 1) {
    parts.push_back(text.substr(start, end - start));
  }
  parts.push_back(text.substr(start));
  return parts;
}

std::vector<Expression> read_expressions(const std::string& text, Sizes& sizes) {
  std::vector<Expression> found;
  if (text.empty()) return found;
  for (const std::string& part : split(text, ',')) found.emplace_back(part, sizes, false);
  return found;
}

std::vector<Pattern> read_patterns(const std::string& text, Sizes& sizes, bool inputs) {
  std::vector<Pattern> found;
  for (const std::string& tensor : split(text, ';')) {
    Pattern pattern;
    if (!inputs && tensor.size() > 1 && tensor[0] == '=') {
      pattern.alias = static_cast<int>(read_number(tensor.substr(1)));
    } else if (!tensor.empty()) {
      for (const std::string& dim : split(tensor, ',')) pattern.dims.emplace_back(dim, sizes, inputs);
    }
    require(pattern.dims.size() <= kMaxRank, "a tensor has more than 8 dimensions");
    found.push_back(std::move(pattern));
  }
  return found;
}

}  // namespace nemo
