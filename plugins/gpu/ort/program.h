// SPDX-License-Identifier: Apache-2.0
//
// Sizes of a launch as little programs: what shapes name, and what follows from the names.
//
// A dimension is an expression in postfix notation, words with spaces between them: numbers, names, and the
// operators + - * // (which rounds down). Dimensions have commas between them, tensors semicolons:
// "batch,steps,64;batch" are two tensors. "=2" in place of a tensor's dimensions means those of input 2, whose
// buffer it shares. A name that stands alone in an input's shape is bound by the first tensor that has it.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace nemo {

// The names of a launch's sizes and their values, in the order in which they are bound.
class Sizes {
 public:
  static constexpr int64_t kUnbound = -1;

  // The place of a name, a new one if it is not known yet.
  size_t place(const std::string& name);
  // The place of a name. Throws Invalid if no input's shape has it.
  size_t known(const std::string& name) const;
  size_t count() const { return names_.size(); }
  const std::string& name(size_t i) const { return names_[i]; }

 private:
  std::vector<std::string> names_;
};

class Expression {
 public:
  // Reads an expression. `binds` tells whether a name that stands alone may be new.
  Expression(const std::string& text, Sizes& sizes, bool binds);

  // The place of a name that stands alone; -1 if it is anything else.
  int lone() const { return lone_; }
  int64_t value(const std::vector<int64_t>& values) const;

 private:
  struct Word {
    char kind;  // 'n': number, 's': size, or an operator
    int64_t number;
  };
  std::vector<Word> words_;
  int lone_ = -1;
};

// The dimensions of a tensor, or the input whose buffer it shares.
struct Pattern {
  std::vector<Expression> dims;
  int alias = -1;
};

std::vector<std::string> split(const std::string& text, char separator);
std::vector<Expression> read_expressions(const std::string& text, Sizes& sizes);
// Shapes of inputs bind names; those of outputs do not, and may share buffers.
std::vector<Pattern> read_patterns(const std::string& text, Sizes& sizes, bool inputs);

}  // namespace nemo
